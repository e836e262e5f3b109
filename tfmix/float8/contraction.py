"""A product of a tensor and a weight, with a letter for each axis."""

import functools
import string
from typing import NamedTuple


class Contraction(NamedTuple):
    """The axes of an einsum that is a product of two matrices, as letters.

    Attributes:
        inputs: The axes of the tensor.
        weight: The axes of the weight.
        outputs: The axes of the result.
        free: The axes that only the tensor and the result have.
        summed: The axes that both factors have, in the weight's order.
        new: The axes that only the weight and the result have.
    """

    inputs: str
    weight: str
    outputs: str
    free: str
    summed: str
    new: str


# A layer multiplies by the same axes in each call, so they are found once.
@functools.cache
def of_einsum(equation: str, ranks: tuple[int, int]) -> Contraction | None:
    """Returns the axes of an einsum of a tensor and a weight.

    Args:
        equation: As `keras.ops.einsum` takes it.
        ranks: The number of axes of both.

    Returns:
        The axes; `None` if it is no product of two matrices.
    """
    equation = equation.replace(" ", "")
    if equation.count("->") != 1 or equation.count(",") != 1:
        return None
    factors, outputs = equation.split("->")
    sides = factors.split(",")
    # Axes of two factors that are not named may be repeated.
    if factors.count("...") > 1:
        return None
    unused = [x for x in string.ascii_letters if x not in equation]
    for rank, side in zip(ranks, sides, strict=True):
        if "..." in side:
            unused = unused[: rank - len(side.replace("...", ""))]
    inputs, weight, outputs = (
        side.replace("...", "".join(unused)) for side in (*sides, outputs)
    )
    free = "".join(x for x in inputs if x not in weight)
    summed = "".join(x for x in weight if x in inputs)
    new = "".join(x for x in weight if x not in inputs)
    is_product = (
        summed
        and sorted(outputs) == sorted(free + new)
        and all(len({*side}) == len(side) for side in (inputs, weight))
    )
    axes = Contraction(inputs, weight, outputs, free, summed, new)
    return axes if is_product else None
