"""Finds the matrix products and convolutions of a program of XLA."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

from tfmix.hardware import hlo_text


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product or convolution, `count` times `(m, k) x (k, n)`.

    Attributes:
        label: The framework's label, which names the place in the model.
        shape: `(m, k, n)`.
        count: The number of equal products in one kernel.
        dtype: The dtype of the factors.
        kernel: The library or compiler of the kernel.
        flops: Multiplications and additions, without those of padded zeros.
    """

    label: str
    shape: tuple[int, int, int]
    count: int
    dtype: str
    kernel: str
    flops: int


def products(
    computations: hlo_text.Computations, times: Mapping[str, int]
) -> Iterator[Product]:
    """Yields the products of all computations, with all rounds of a loop."""
    callers = {
        name: instruction
        for among in computations.values()
        for instruction in among.values()
        if instruction.operation == "fusion"
        for name in instruction.called
    }
    for name, among in computations.items():
        for instruction in among.values():
            for mark in (
                instruction.operation,
                *hlo_text.targets_of(instruction),
            ):
                if measure := _MEASURES.get(mark):
                    kernel = _kernel(instruction, callers.get(name))
                    product = _product(instruction, among, measure, kernel)
                    flops = product.flops * times.get(name, 1)
                    yield dataclasses.replace(product, flops=flops)


def _product(
    instruction: hlo_text.Instruction,
    among: dict[str, hlo_text.Instruction],
    measure: "_Measure",
    kernel: str,
) -> Product:
    kinds = [among[name].result for name in instruction.operands[:2]]
    shape, count, flops = measure(
        instruction, [hlo_text.shape_of(kind) for kind in kinds]
    )
    dtypes = "/".join(sorted({hlo_text.dtype_of(kind) for kind in kinds}))
    return Product(instruction.label, shape, count, dtypes, kernel, flops)


def _kernel(
    instruction: hlo_text.Instruction, caller: hlo_text.Instruction | None
) -> str:
    """Returns the library or compiler of a product's kernel."""
    for target in hlo_text.targets_of(instruction):
        return LIBRARIES[target]
    text = caller.rest if caller else ""
    if "__triton" in text:
        return "Triton"
    return "XLA"


# The shape of a product, their number, and the operations of all.
_Measured = tuple[tuple[int, int, int], int, int]
_Measure = Callable[[hlo_text.Instruction, list[list[int]]], _Measured]


def _dot(
    instruction: hlo_text.Instruction, shapes: list[list[int]]
) -> _Measured:
    summed, batch = (
        [shapes[0][axis] for axis in _axes(instruction, f"lhs_{name}")]
        for name in ("contracting", "batch")
    )
    k, count = math.prod(summed), math.prod(batch)
    left, right = (math.prod(shape) // max(k * count, 1) for shape in shapes)
    return (left, k, right), count, 2 * left * k * right * count


def _axes(instruction: hlo_text.Instruction, name: str) -> list[int]:
    match = re.search(
        rf'{name}_(?:dims=\{{|dimensions":\[)([\d",]*)[\]}}]', instruction.rest
    )
    return [int(axis) for axis in re.findall(r"\d+", match[1])] if match else []


def _convolution(
    instruction: hlo_text.Instruction, shapes: list[list[int]]
) -> _Measured:
    inputs, kernel = shapes
    return _measure_convolution(
        instruction, inputs, kernel, hlo_text.shape_of(instruction.result)
    )


def _data_gradient(
    instruction: hlo_text.Instruction, shapes: list[list[int]]
) -> _Measured:
    outputs, kernel = shapes
    inputs = hlo_text.shape_of(instruction.result)
    (m, k, n), count, flops = _measure_convolution(
        instruction, inputs, kernel, outputs
    )
    return (m, n, k), count, flops


def _filter_gradient(
    instruction: hlo_text.Instruction, shapes: list[list[int]]
) -> _Measured:
    inputs, outputs = shapes
    kernel = hlo_text.shape_of(instruction.result)
    (m, k, n), count, flops = _measure_convolution(
        instruction, inputs, kernel, outputs
    )
    return (k, m, n), count, flops


def _measure_convolution(
    instruction: hlo_text.Instruction,
    inputs: list[int],
    kernel: list[int],
    outputs: list[int],
) -> _Measured:
    """Measures a convolution as a product of (positions, summed, filters)."""
    labels = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)[0]
    by_label = [
        dict(zip(names, shape, strict=False))
        for names, shape in zip(labels, (inputs, kernel, outputs), strict=True)
    ]
    groups = re.search(r"feature_group_count=(\d+)", instruction.rest)
    count = int(groups[1]) if groups else 1
    positions = taps = hits = 1
    for axis, window in enumerate(_windows(instruction)):
        into, over, out = (sizes[str(axis)] for sizes in by_label)
        hit = _hits(into, over, out, window)
        positions, hits = positions * out, hits * hit
        # Taps that fall beyond the edge, or between the numbers of a dilated
        # input, do not count.
        taps *= -(-hit // out)
    rows, features = by_label[2]["b"], by_label[1]["i"]
    filters = by_label[1]["o"]
    shape = rows * positions, taps * features, filters // count
    return shape, count, 2 * rows * hits * features * filters


def _windows(instruction: hlo_text.Instruction) -> list[dict[str, int]]:
    """Returns the window of a convolution along each of its axes."""
    match = re.search(r"window=\{([^}]*)\}", instruction.rest)
    fields = (
        dict(field.split("=") for field in match[1].split()) if match else {}
    )
    split = {name: text.split("x") for name, text in fields.items()}
    axes = []
    for axis in range(len(split.get("size", []))):
        own = {name: values[axis] for name, values in split.items()}
        own["pad"] = own.get("pad", "0").split("_")[0]
        axes.append({name: int(value) for name, value in own.items()})
    return axes


def _hits(inputs: int, over: int, outputs: int, window: dict[str, int]) -> int:
    """Counts the pairs of position and tap that fall on a number."""
    stride, between = window.get("stride", 1), window.get("rhs_dilate", 1)
    spread = window.get("lhs_dilate", 1)
    hits = 0
    for tap in range(over):
        first = tap * between - window["pad"]
        if spread == 1:
            low = max(0, -(first // stride))
            high = min(outputs - 1, (inputs - 1 - first) // stride)
            hits += max(0, high - low + 1)
            continue
        reached = range(first, first + outputs * stride, stride)
        hits += sum(
            0 <= place <= (inputs - 1) * spread and not place % spread
            for place in reached
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
LIBRARIES = {
    name: "cuBLAS" if "cublas" in name else "cuDNN"
    for name in _MEASURES
    if name.startswith("__")
}
