"""Finds the matrix products and convolutions of a program of XLA."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

from tfmix.tools.hardware import hlo_text


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product or convolution, `count` times `(m, k) x (k, n)`.

    Attributes:
        label: The framework's label, which names the place in the model.
        shape: `(m, k, n)`.
        count: The number of equal products in one kernel.
        dtype: The dtype of the factors.
        kernel: The library or compiler of the kernel.
        flops: Multiplications and additions, those of zeros at the edges of a
            convolution included.
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
            marks = instruction.operation, *hlo_text.targets_of(instruction)
            for measure in filter(None, map(_MEASURES.get, marks)):
                kinds = [among[x].result for x in instruction.operands[:2]]
                shape, count, flops = measure(
                    instruction, [*map(hlo_text.shape_of, kinds)]
                )
                yield Product(
                    instruction.label,
                    shape,
                    count,
                    "/".join(sorted({*map(hlo_text.dtype_of, kinds)})),
                    _kernel(instruction, callers.get(name)),
                    flops * times.get(name, 1),
                )


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


_ROLES = ("inputs", "kernel", "outputs")


def _convolution(
    roles: tuple[str, str, str],
    order: tuple[int, int, int],
    instruction: hlo_text.Instruction,
    shapes: list[list[int]],
) -> _Measured:
    """Measures a convolution, or a gradient of one, as a product.

    `roles` names the two operands and the result. `order` says which sides of
    the convolution's product are those of this one.
    """
    sizes = [*shapes, hlo_text.shape_of(instruction.result)]
    arrays = dict(zip(roles, sizes, strict=True))
    labels = re.findall(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)[0]
    inputs, kernel, outputs = (
        dict(zip(names, arrays[role], strict=False))
        for names, role in zip(labels, _ROLES, strict=True)
    )
    groups = re.search(r"feature_group_count=(\d+)", instruction.rest)
    count = int(groups[1]) if groups else 1
    positions, taps = (
        math.prod(size for axis, size in array.items() if axis.isdigit())
        for array in (outputs, kernel)
    )
    # Taps between the numbers of a dilated input do not count.
    if spread := re.search(r"lhs_dilate=([\dx]+)", instruction.rest):
        taps = -(-taps // math.prod(map(int, spread[1].split("x"))))
    rows, features, filters = outputs["b"], kernel["i"], kernel["o"]
    sides = rows * positions, taps * features, filters // count
    m, k, n = (sides[place] for place in order)
    return (m, k, n), count, 2 * m * k * n * count


# The sides of a convolution's product are positions of the window, what is
# summed, and filters.
_forward = functools.partial(_convolution, _ROLES, (0, 1, 2))
_data_gradient = functools.partial(
    _convolution, ("outputs", "kernel", "inputs"), (0, 2, 1)
)
_filter_gradient = functools.partial(
    _convolution, ("inputs", "outputs", "kernel"), (1, 0, 2)
)
_MEASURES: dict[str, _Measure] = {
    "dot": _dot,
    "convolution": _forward,
    "__cublas$gemm": _dot,
    "__cublas$lt$matmul": _dot,
    "__cublas$lt$matmul$f8": _dot,
    "__cudnn$convForward": _forward,
    "__cudnn$convBiasActivationForward": _forward,
    "__cudnn$convBackwardInput": _data_gradient,
    "__cudnn$convBackwardFilter": _filter_gradient,
}
LIBRARIES = {
    name: "cuBLAS" if "cublas" in name else "cuDNN"
    for name in _MEASURES
    if name.startswith("__")
}
