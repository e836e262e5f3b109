"""Finds the kernels and copies of a program, and counts the bytes they move."""

import math
import re

from tfmix.tools.hardware import hlo_products, hlo_text

# These instructions cost nothing, or are counted separately.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id "
    "replica-id copy conditional while call optimization-barrier "
    "domain".split()
)
# Asynchronous instructions begin in one line and end in another.
_PARTS = ("-start", "-update", "-done")
# These custom calls are hints to the compiler, and run nothing.
_NO_WORK = (
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "AllocateBuffer",
    "X64Split",
    "X64Combine",
    "Sharding",
)
_ARRAY = re.compile(r"[a-z][a-z0-9]*\[[\d,<=]*\](?:\{[^}]*\})?")
# A layout with this mark is in a TPU's on-chip memory.
_INSIDE = "S(1)"
# These read only the part of their first operand that they return.
_PICK = ("gather", "dynamic-slice", "slice")
# These write in place, as much as the operand of this number holds.
_WRITE_PART = {"dynamic-update-slice": 1, "scatter": 2}
# This stands for the result, where other numbers stand for operands.
_RESULT = -1


def is_kernel(instruction: hlo_text.Instruction) -> bool:
    """Returns whether an instruction is a launch that computes something."""
    if instruction.operation == "fusion":
        return True
    if instruction.operation == "custom-call":
        return not any(name in instruction.rest for name in _NO_WORK)
    operation = instruction.operation
    if operation in _FREE or operation.endswith(_PARTS):
        return False
    # Scalars are computed by a TPU's control unit.
    return "[]" not in instruction.result


def is_copy(instruction: hlo_text.Instruction) -> bool:
    """Returns whether an instruction copies within the device's memory."""
    # Data that a TPU fetches into its on-chip memory does not count.
    return (
        instruction.operation in ("copy", "copy-start")
        and "S(" not in instruction.result
    )


def is_transfer(instruction: hlo_text.Instruction) -> bool:
    """Returns whether an instruction only moves numbers."""
    transfers = ("copy", "copy-start", "slice-start", "dynamic-slice-start")
    return instruction.operation in transfers


def moved_bytes(
    instruction: hlo_text.Instruction,
    among: dict[str, hlo_text.Instruction],
    computations: hlo_text.Computations,
) -> int:
    """Counts the bytes of the device's memory that an instruction moves."""
    if instruction.operation.endswith("-start"):
        # The result lists source and destination. Of a transfer to or from
        # on-chip memory, only one of them is in the device's memory.
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
    result = instruction.result
    if any(
        target in hlo_products.LIBRARIES
        for target in hlo_text.targets_of(instruction)
    ):
        # The other arrays are the library's workspace.
        result = _ARRAY.findall(result)[0]
    written = min(_outside(result), parts.get(_RESULT, math.inf))
    return int(sum(read) + written)


def _needed_in_part(body: dict[str, hlo_text.Instruction]) -> dict[int, int]:
    """Returns the bytes of the operands that a fusion only uses in part."""
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
    """Returns how many bytes of an operand are used; `None` for all."""
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
        for array in _ARRAY.findall(kind)
        if _INSIDE in array
    )


def _outside(kind: str) -> int:
    return hlo_text.size(kind) - _inside(kind)
