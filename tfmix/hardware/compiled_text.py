"""Reads what a compiler made of a training step: kernels, products, copies."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

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
# Instructions that cost nothing, or are counted by themselves.
_FREE = frozenset(
    "parameter constant get-tuple-element tuple bitcast after-all partition-id "
    "replica-id copy conditional while call optimization-barrier "
    "domain".split()
)
_EXCHANGES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all collective-permute "
    "all-reduce-start all-gather-start collective-permute-start".split()
)
# Parts of what is begun in one line and waited for in another.
_PARTS = ("-start", "-update", "-done")
# What runs step by step as the program does; a fusion's body is one kernel.
_STEPWISE = frozenset("while conditional call async-start".split())
# What a loop counts to where its framework sets no limit.
_NO_LIMIT = 2**31 - 1
# Custom calls that tell the compiler something, and run nothing.
_NO_WORK = (
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "AllocateBuffer",
    "X64Split",
    "X64Combine",
    "Sharding",
)
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\((.*)"
)
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\]")
_PLACED = re.compile(r"[a-z][a-z0-9]*\[[\d,<=]*\](?:\{[^}]*\})?")
# A layout's mark of a TPU's own memory, beside its units.
_INSIDE = "S(1)"
# What reads of its first operand only what it returns.
_PICK = ("gather", "dynamic-slice", "slice")
# What writes in place, by the operand that says how much.
_WRITE_PART = {"dynamic-update-slice": 1, "scatter": 2}
# Beside the places of operands: what an instruction returns.
_RESULT = -1
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%([\w.\-]+)|(?:branch_computations|called_computations)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    result: str  # its type, with layout
    operation: str
    rest: str  # operands and all that follows them

    @property
    def operands(self) -> list[str]:
        """The names of what it reads."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    @property
    def called(self) -> list[str]:
        """The names of computations that it runs."""
        found = _CALLED.findall(self.rest)
        return [
            name.strip().lstrip("%")
            for one, many in found
            for name in ([one] if one else many.split(","))
        ]

    @property
    def label(self) -> str:
        """Where in the model it comes from, as the framework says."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product or convolution, `count` times `(m, k) x (k, n)`."""

    label: str  # where in the model it comes from, as the framework says
    shape: tuple[int, int, int]
    count: int
    dtype: str  # of what is multiplied
    kernel: str  # what computes it
    flops: int  # multiplications and additions, of zeros at the edge none


@dataclasses.dataclass(frozen=True)
class Program:
    """What can be counted in a program.

    A loop's body counts as often as it runs, and once where only the data say.

    Attributes:
        kernels: Launches that compute something.
        copies: Copies in the device's memory.
        conditionals: Branches; a GPU's wait for the host.
        exchanges: Exchanges between devices.
        exchanged: Bytes that each device sends.
        bytes: Bytes of the device's memory that are read and written. What a
            TPU fetches into its own memory counts once, as it is fetched; of
            what is gathered and scattered, the rows.
        products: Matrix products and convolutions, with the operations of all
            rounds of a loop.
        open_loops: Loops whose body counts once, since only the data say.
    """

    kernels: int
    copies: int
    conditionals: int
    exchanges: int
    exchanged: int
    bytes: int
    products: tuple[Product, ...]
    open_loops: int


_Computations = dict[str, dict[str, Instruction]]


def read(text: str) -> Program:
    """Reads a compiled program in XLA's text form."""
    computations, entry = _parse(text)
    times = _times(entry, computations)
    steps = _stepwise(entry, computations)
    run = [
        (each, computations[name], times[name])
        for name in steps
        for each in computations[name].values()
    ]
    given = [(x, n) for x, _, n in run if x.operation in _EXCHANGES]
    return Program(
        kernels=sum(n for each, _, n in run if _is_kernel(each)),
        copies=sum(n for each, _, n in run if _is_copy(each)),
        conditionals=sum(n for x, _, n in run if x.operation == "conditional"),
        exchanges=sum(n for _, n in given),
        exchanged=sum(n * _given_bytes(each) for each, n in given),
        bytes=sum(
            n * _moved(each, among, computations)
            for each, among, n in run
            if _is_kernel(each) or _is_transfer(each)
        ),
        products=tuple(_products(computations, times)),
        open_loops=sum(
            _rounds(each, among, computations) is None for each, among, _ in run
        ),
    )


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


def _parse(text: str) -> tuple[_Computations, str]:
    found: _Computations = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            name = head[2]
            found[name] = {}
            entry = name if head[1] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            found[name][match[1]] = Instruction(*match.groups())
    return found, entry


def _stepwise(name: str, computations: _Computations) -> list[str]:
    """Returns a computation and what it runs step by step, each once."""
    found: dict[str, None] = {}
    waiting = [name]
    while waiting:
        found[name := waiting.pop()] = None
        for each in computations[name].values():
            if each.operation in _STEPWISE:
                waiting += [one for one in each.called if one not in found]
    return list(found)


def _times(name: str, computations: _Computations) -> dict[str, int]:
    """Returns how often each computation runs that one of them leads to."""
    found = {name: 1}
    waiting = [name]
    while waiting:
        among = computations.get(name := waiting.pop(), {})
        for each in among.values():
            rounds = _rounds(each, among, computations) or 1
            for one in each.called:
                if one not in found:
                    found[one] = found[name] * rounds
                    waiting.append(one)
    return found


def _rounds(
    each: Instruction,
    among: dict[str, Instruction],
    computations: _Computations,
) -> int | None:
    """Returns how often a loop's body runs, if it can be told; else `None`."""
    if each.operation != "while":
        return 1
    if known := re.search(r'known_trip_count":{"n":"(\d+)"', each.rest):
        return int(known[1])
    # Frameworks count up from 0, to a number that the condition holds or that
    # goes into the loop: a constant, or where another loop's count ended.
    (name,) = re.findall(r"condition=%([\w.\-]+)", each.rest)
    condition = list(computations[name].values())
    inner = [one for x in condition for one in x.called]
    condition += [x for one in inner for x in computations[one].values()]
    found = [_number(one) for one in condition]
    init = among[each.operands[0]]
    start = init.operands if init.operation == "tuple" else []
    for one in condition:
        place = re.search(r"index=(\d+)", one.rest)
        if one.operation == "get-tuple-element" and place and start:
            given = among[start[int(place[1])]]
            found.append(_number(given))
            if given.operation == "get-tuple-element":
                given = among[given.operands[0]]
                if given.operation == "while":
                    found.append(_rounds(given, among, computations))
    return max(filter(None, found), default=None)


def _number(each: Instruction) -> int | None:
    if each.operation != "constant" or not each.result.startswith("s32[]"):
        return None
    number = int(each.rest.partition(")")[0])
    return number if number < _NO_LIMIT else None


def _is_kernel(each: Instruction) -> bool:
    if each.operation == "fusion":
        return True
    if each.operation == "custom-call":
        return not any(name in each.rest for name in _NO_WORK)
    if each.operation in _FREE | _EXCHANGES or each.operation.endswith(_PARTS):
        return False
    # A TPU's scalars are the business of its control unit.
    return "[]" not in each.result


def _is_copy(each: Instruction) -> bool:
    # What a TPU fetches into its own memory ahead of time is no copy.
    return each.operation in ("copy", "copy-start") and "S(" not in each.result


def _is_transfer(each: Instruction) -> bool:
    known = ("copy", "copy-start", "slice-start", "dynamic-slice-start")
    return each.operation in known


def _moved(
    each: Instruction,
    among: dict[str, Instruction],
    computations: _Computations,
) -> int:
    """Counts the bytes of the device's memory that an instruction moves."""
    if each.operation.endswith("-start"):
        # Into a TPU's own memory or out of it; else from and to.
        return _inside(each.result) or size(each.result)
    body = computations[each.called[0]] if each.operation == "fusion" else {}
    parts = _parts(body)
    read = [
        min(_outside(among[name].result), parts.get(place, math.inf))
        for place, name in enumerate(each.operands)
        if name in among
    ]
    made = each.result
    if any(target in _LIBRARIES for target in _target_of(each)):
        # The rest is a library's room to work in.
        made = _PLACED.findall(made)[0]
    written = min(_outside(made), parts.get(_RESULT, math.inf))
    return int(sum(read) + written)


def _parts(body: dict[str, Instruction]) -> dict[int, int]:
    """Returns, by place, the bytes of operands that a fusion needs in part."""
    found = {}
    for name, each in body.items():
        if each.operation == "parameter":
            uses = [use for use in body.values() if name in use.operands]
            sizes = [_part(use, name, body) for use in uses]
            if None not in sizes:
                place = int(each.rest.partition(")")[0])
                found[place] = sum(filter(None, sizes))
    for last in [*body.values()][-1:]:
        if last.operation in _WRITE_PART:
            found[_RESULT] = _part(last, last.operands[0], body) or 0
    return found


def _part(
    use: Instruction, name: str, body: dict[str, Instruction]
) -> int | None:
    """Returns the bytes of an operand that are used; `None` for all."""
    if use.operands.index(name) or use.operands.count(name) > 1:
        return None
    if use.operation in _PICK:
        return size(use.result)
    if use.operation in _WRITE_PART:
        return size(body[use.operands[_WRITE_PART[use.operation]]].result)
    return None


def _inside(kind: str) -> int:
    return sum(size(one) for one in _PLACED.findall(kind) if _INSIDE in one)


def _outside(kind: str) -> int:
    return size(kind) - _inside(kind)


def _given_bytes(each: Instruction) -> int:
    # One that is begun here returns what it was given, too.
    begun = each.operation.endswith("-start") and each.operation not in (
        "all-reduce-start",
    )
    return size(each.result) // (2 if begun else 1)


def _products(
    computations: _Computations, times: Mapping[str, int]
) -> Iterator[Product]:
    callers = {
        name: each
        for among in computations.values()
        for each in among.values()
        if each.operation == "fusion"
        for name in each.called
    }
    for name, among in computations.items():
        for each in among.values():
            for mark in (each.operation, *_target_of(each)):
                if measure := _MEASURES.get(mark):
                    kernel = _kernel(each, callers.get(name))
                    made = _product(each, among, measure, kernel)
                    flops = made.flops * times.get(name, 1)
                    yield dataclasses.replace(made, flops=flops)


def _target_of(each: Instruction) -> list[str]:
    return re.findall(r'custom_call_target="([^"]*)"', each.rest)


def _product(
    each: Instruction,
    among: dict[str, Instruction],
    measure: "_Measure",
    kernel: str,
) -> Product:
    kinds = [among[name].result for name in each.operands[:2]]
    shape, count, flops = measure(each, [_shape(kind) for kind in kinds])
    dtypes = "/".join(sorted({_dtype(kind) for kind in kinds}))
    return Product(each.label, shape, count, dtypes, kernel, flops)


def _kernel(each: Instruction, caller: Instruction | None) -> str:
    """Names what computes a product."""
    for target in _target_of(each):
        return _LIBRARIES[target]
    text = caller.rest if caller else ""
    if "__triton" in text:
        return "Triton"
    return "XLA"


# The shape of a product, how many there are, and the operations of all.
_Measured = tuple[tuple[int, int, int], int, int]
_Measure = Callable[[Instruction, list[list[int]]], _Measured]


def _dot(each: Instruction, shapes: list[list[int]]) -> _Measured:
    summed, batch = (
        [shapes[0][axis] for axis in _axes(each, f"lhs_{name}")]
        for name in ("contracting", "batch")
    )
    k, count = math.prod(summed), math.prod(batch)
    left, right = (math.prod(shape) // max(k * count, 1) for shape in shapes)
    return (left, k, right), count, 2 * left * k * right * count


def _axes(each: Instruction, name: str) -> list[int]:
    match = re.search(
        rf'{name}_(?:dims=\{{|dimensions":\[)([\d",]*)[\]}}]', each.rest
    )
    return [int(axis) for axis in re.findall(r"\d+", match[1])] if match else []


def _convolution(each: Instruction, shapes: list[list[int]]) -> _Measured:
    given, kernel = shapes
    return _convolved(each, given, kernel, _shape(each.result))


def _data_gradient(each: Instruction, shapes: list[list[int]]) -> _Measured:
    made, kernel = shapes
    given = _shape(each.result)
    (m, k, n), count, flops = _convolved(each, given, kernel, made)
    return (m, n, k), count, flops


def _filter_gradient(each: Instruction, shapes: list[list[int]]) -> _Measured:
    given, made = shapes
    kernel = _shape(each.result)
    (m, k, n), count, flops = _convolved(each, given, kernel, made)
    return (k, m, n), count, flops


def _convolved(
    each: Instruction, given: list[int], kernel: list[int], made: list[int]
) -> _Measured:
    """Measures a convolution: positions, what is summed at each, filters."""
    labels = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)[0]
    by_label = [
        dict(zip(names, shape, strict=False))
        for names, shape in zip(labels, (given, kernel, made), strict=True)
    ]
    groups = re.search(r"feature_group_count=(\d+)", each.rest)
    count = int(groups[1]) if groups else 1
    positions = taps = hits = 1
    for axis, window in enumerate(_windows(each)):
        into, over, out = (sizes[str(axis)] for sizes in by_label)
        hit = _hits(into, over, out, window)
        positions, hits = positions * out, hits * hit
        # Of a window that is mostly over the edge, or between the numbers
        # that a dilation spreads, what it hits.
        taps *= -(-hit // out)
    rows, features = by_label[2]["b"], by_label[1]["i"]
    filters = by_label[1]["o"]
    shape = rows * positions, taps * features, filters // count
    return shape, count, 2 * rows * hits * features * filters


def _windows(each: Instruction) -> list[dict[str, int]]:
    """Returns how a convolution moves along each of its axes."""
    found = re.search(r"window=\{([^}]*)\}", each.rest)
    fields = dict(one.split("=") for one in found[1].split()) if found else {}
    split = {name: text.split("x") for name, text in fields.items()}
    axes = []
    for axis in range(len(split.get("size", []))):
        own = {name: values[axis] for name, values in split.items()}
        own["pad"] = own.get("pad", "0").split("_")[0]
        axes.append({name: int(value) for name, value in own.items()})
    return axes


def _hits(given: int, over: int, made: int, window: dict[str, int]) -> int:
    """Counts the pairs of place and tap that fall on a number."""
    stride, between = window.get("stride", 1), window.get("rhs_dilate", 1)
    spread = window.get("lhs_dilate", 1)
    hits = 0
    for tap in range(over):
        first = tap * between - window["pad"]
        if spread == 1:
            low = max(0, -(first // stride))
            high = min(made - 1, (given - 1 - first) // stride)
            hits += max(0, high - low + 1)
            continue
        reached = range(first, first + made * stride, stride)
        hits += sum(
            0 <= each <= (given - 1) * spread and not each % spread
            for each in reached
        )
    return hits


_MEASURES: dict[str, _Measure] = {
    "dot": _dot,
    "convolution": _convolution,
    "__cublas$gemm": _dot,
    "__cublas$lt$matmul": _dot,
    "__cublas$lt$matmul$f8": _dot,
    "__cudnn$convForward": _convolution,
    "__cudnn$convBiasActivationForward": _convolution,
    "__cudnn$convBackwardInput": _data_gradient,
    "__cudnn$convBackwardFilter": _filter_gradient,
}
_LIBRARIES = {
    name: "cuBLAS" if "cublas" in name else "cuDNN"
    for name in _MEASURES
    if name.startswith("__")
}


def _shape(kind: str) -> list[int]:
    """Returns the shape of a type, of a tuple's first."""
    found = _ARRAY.search(kind)
    return [int(one) for one in found[2].split(",") if one] if found else []


def _dtype(kind: str) -> str:
    found = _ARRAY.search(kind)
    name = found[1] if found else ""
    for start, dtype in _NAMES.items():
        if name.startswith(start):
            return dtype if start not in "su" else dtype + name[1:]
    return name
