"""Parses XLA's text form of a program, and counts how often each part runs."""

import dataclasses
import math
import re

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_NAMES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "f8": "float8",
    "s": "int",
    "u": "uint",
}
# These run their bodies instruction by instruction. A fusion is one kernel.
_STEPWISE = frozenset("while conditional call async-start".split())
# Frameworks use this limit for a loop without a limit.
_NO_LIMIT = 2**31 - 1
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\((.*)"
)
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%([\w.\-]+)|(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    result: str  # the type of the result, with its layout
    operation: str
    rest: str  # the operands, and everything after them

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it reads."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs."""
        calls = _CALLED.findall(self.rest)
        return [
            name.strip().lstrip("%")
            for single, many in calls
            for name in ([single] if single else many.split(","))
        ]

    @property
    def label(self) -> str:
        """The framework's label, which names the place in the model."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


Computations = dict[str, dict[str, Instruction]]


def size(kind: str) -> int:
    """Returns the bytes of a type, tuples included.

    Examples:
        >>> size("(f32[2,3]{1,0}, bf16[])")
        26
    """
    return sum(
        math.prod(map(int, filter(None, shape.split(",")))) * _bits(dtype) // 8
        for dtype, shape in _ARRAY.findall(kind)
    )


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.search(r"[a-z](\d+)", dtype)
    return int(match[1]) if match else 0


def parse(text: str) -> tuple[Computations, str]:
    """Returns the computations of a program, and the name of its entry."""
    computations: Computations = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            name = head[2]
            computations[name] = {}
            entry = name if head[1] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            computations[name][match[1]] = Instruction(*match.groups())
    return computations, entry


def stepwise(name: str, computations: Computations) -> list[str]:
    """Returns a computation and those that it runs, without duplicates."""
    names: dict[str, None] = {}
    waiting = [name]
    while waiting:
        names[name := waiting.pop()] = None
        for instruction in computations[name].values():
            if instruction.operation in _STEPWISE:
                waiting += [
                    callee
                    for callee in instruction.called
                    if callee not in names
                ]
    return list(names)


def times(name: str, computations: Computations) -> dict[str, int]:
    """Returns how often a computation and those that it calls run."""
    counts = {name: 1}
    waiting = [name]
    while waiting:
        among = computations.get(name := waiting.pop(), {})
        for instruction in among.values():
            count = rounds(instruction, computations) or 1
            for callee in instruction.called:
                if callee not in counts:
                    counts[callee] = counts[name] * count
                    waiting.append(callee)
    return counts


def rounds(loop: Instruction, computations: Computations) -> int | None:
    """Returns how often a loop's body runs; `None` if that is unknown."""
    if loop.operation != "while":
        return 1
    if known := re.search(r'known_trip_count":{"n":"(\d+)"', loop.rest):
        return int(known[1])
    # Frameworks count up from 0 to a constant in the condition.
    (name,) = re.findall(r"condition=%([\w.\-]+)", loop.rest)
    condition = list(computations[name].values())
    inner = [callee for x in condition for callee in x.called]
    condition += [x for callee in inner for x in computations[callee].values()]
    return max(filter(None, map(_number, condition)), default=None)


def _number(instruction: Instruction) -> int | None:
    is_constant = instruction.operation == "constant"
    if not (is_constant and instruction.result.startswith("s32[]")):
        return None
    number = int(instruction.rest.partition(")")[0])
    return number if number < _NO_LIMIT else None


def targets_of(instruction: Instruction) -> list[str]:
    """Returns the target of a custom call; an empty list for others."""
    return re.findall(r'custom_call_target="([^"]*)"', instruction.rest)


def shape_of(kind: str) -> list[int]:
    """Returns the shape of a type; of a tuple, that of its first element."""
    match = _ARRAY.search(kind)
    return [int(side) for side in match[2].split(",") if side] if match else []


def dtype_of(kind: str) -> str:
    """Returns the dtype of a type, `"float16"` for `"f16[8,64]"`."""
    match = _ARRAY.search(kind)
    name = match[1] if match else ""
    for start, dtype in _NAMES.items():
        if name.startswith(start):
            return dtype if start not in "su" else dtype + name[1:]
    return name
