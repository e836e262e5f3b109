"""Which instructions are kernels and copies, and what bytes they move."""

import math
import re

from tfmix.hardware import hlo_products, hlo_text

# Instructions that cost nothing, or are counted by themselves.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id "
    "replica-id copy conditional while call optimization-barrier "
    "domain".split()
)
EXCHANGES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all collective-permute "
    "all-reduce-start all-gather-start collective-permute-start".split()
)
# Parts of what is begun in one line and waited for in another.
_PARTS = ("-start", "-update", "-done")
# Custom calls that tell the compiler something, and run nothing.
_NO_WORK = (
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "AllocateBuffer",
    "X64Split",
    "X64Combine",
    "Sharding",
)
_PLACED = re.compile(r"[a-z][a-z0-9]*\[[\d,<=]*\](?:\{[^}]*\})?")
# A layout's mark of a TPU's own memory, beside its units.
_INSIDE = "S(1)"
# What reads of its first operand only what it returns.
_PICK = ("gather", "dynamic-slice", "slice")
# What writes in place, by the operand that says how much.
_WRITE_PART = {"dynamic-update-slice": 1, "scatter": 2}
# Beside the places of operands: what an instruction returns.
_RESULT = -1


def is_kernel(instruction: hlo_text.Instruction) -> bool:
    """Says whether an instruction is a launch that computes something."""
    if instruction.operation == "fusion":
        return True
    if instruction.operation == "custom-call":
        return not any(name in instruction.rest for name in _NO_WORK)
    if (
        instruction.operation in _FREE | EXCHANGES
        or instruction.operation.endswith(_PARTS)
    ):
        return False
    # A TPU's scalars are the business of its control unit.
    return "[]" not in instruction.result


def is_copy(instruction: hlo_text.Instruction) -> bool:
    """Says whether an instruction copies in the device's memory."""
    # What a TPU fetches into its own memory ahead of time is no copy.
    return (
        instruction.operation in ("copy", "copy-start")
        and "S(" not in instruction.result
    )


def is_transfer(instruction: hlo_text.Instruction) -> bool:
    """Says whether an instruction only moves numbers."""
    known = ("copy", "copy-start", "slice-start", "dynamic-slice-start")
    return instruction.operation in known


def moved(
    instruction: hlo_text.Instruction,
    among: dict[str, hlo_text.Instruction],
    computations: hlo_text.Computations,
) -> int:
    """Counts the bytes of the device's memory that an instruction moves."""
    if instruction.operation.endswith("-start"):
        # Into a TPU's own memory or out of it; else from and to.
        return _inside(instruction.result) or hlo_text.size(instruction.result)
    body = (
        computations[instruction.called[0]]
        if instruction.operation == "fusion"
        else {}
    )
    parts = _needed_in_part(body)
    read = [
        min(_outside(among[name].result), parts.get(place, math.inf))
        for place, name in enumerate(instruction.operands)
        if name in among
    ]
    made = instruction.result
    if any(
        target in hlo_products.LIBRARIES
        for target in hlo_text.targets_of(instruction)
    ):
        # The rest is a library's room to work in.
        made = _PLACED.findall(made)[0]
    written = min(_outside(made), parts.get(_RESULT, math.inf))
    return int(sum(read) + written)


def _needed_in_part(body: dict[str, hlo_text.Instruction]) -> dict[int, int]:
    """Returns, by place, the bytes of operands that a fusion needs in part."""
    parts = {}
    for name, instruction in body.items():
        if instruction.operation == "parameter":
            uses = [use for use in body.values() if name in use.operands]
            sizes = [_part(use, name, body) for use in uses]
            if None not in sizes:
                place = int(instruction.rest.partition(")")[0])
                parts[place] = sum(filter(None, sizes))
    for last in [*body.values()][-1:]:
        if last.operation in _WRITE_PART:
            parts[_RESULT] = _part(last, last.operands[0], body) or 0
    return parts


def _part(
    use: hlo_text.Instruction, name: str, body: dict[str, hlo_text.Instruction]
) -> int | None:
    """Returns the bytes of an operand that are used; `None` for all."""
    if use.operands.index(name) or use.operands.count(name) > 1:
        return None
    if use.operation in _PICK:
        return hlo_text.size(use.result)
    if use.operation in _WRITE_PART:
        return hlo_text.size(
            body[use.operands[_WRITE_PART[use.operation]]].result
        )
    return None


def _inside(kind: str) -> int:
    return sum(
        hlo_text.size(array)
        for array in _PLACED.findall(kind)
        if _INSIDE in array
    )


def _outside(kind: str) -> int:
    return hlo_text.size(kind) - _inside(kind)


def given_bytes(exchange: hlo_text.Instruction) -> int:
    """Returns the bytes that an exchange takes from each device."""
    # One that is begun here returns what it was given, too.
    operation = exchange.operation
    begun = operation.endswith("-start") and operation != "all-reduce-start"
    return hlo_text.size(exchange.result) // (2 if begun else 1)
