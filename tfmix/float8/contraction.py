"""A product of a tensor and a weight, with a letter for each axis."""

import dataclasses
import functools
import string


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The axes that an einsum of two factors sums, and those that it keeps.

    Args:
        inputs: The letters of the axes of the tensor.
        weight: The letters of the axes of the weight.
        outputs: The letters of the axes of the result.
    """

    inputs: str
    weight: str
    outputs: str

    @functools.cached_property
    def batch(self) -> str:
        """The letters that both factors and the result have."""
        return "".join(
            x for x in self.inputs if x in {*self.weight} & {*self.outputs}
        )

    @functools.cached_property
    def summed(self) -> str:
        """The letters that both factors have, but not the result."""
        kept = self.batch + self.free
        return "".join(x for x in self.inputs if x not in kept)

    @functools.cached_property
    def free(self) -> str:
        """The letters that only the tensor and the result have."""
        return "".join(x for x in self.inputs if x not in self.weight)

    @functools.cached_property
    def new(self) -> str:
        """The letters that only the weight and the result have."""
        return "".join(x for x in self.weight if x not in self.inputs)

    @functools.cached_property
    def is_product(self) -> bool:
        """Returns whether it is a product of matrices, or a batch of them."""
        return bool(
            self.summed
            and len(set(self.inputs)) == len(self.inputs)
            and len(set(self.weight)) == len(self.weight)
            and sorted(self.outputs)
            == sorted(self.batch + self.free + self.new)
        )


# A layer multiplies by the same axes in each call, so they are found once.
@functools.cache
def of_einsum(equation: str, ranks: tuple[int, int]) -> Contraction | None:
    """Returns the axes of an einsum of a tensor and a weight.

    Args:
        equation: As `keras.ops.einsum` takes it.
        ranks: The number of axes of both.

    Returns:
        The axes; `None` if it is no product of matrices.
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
    letters = (
        side.replace("...", "".join(unused)) for side in (*sides, outputs)
    )
    found = Contraction(*letters)
    return found if found.is_product else None
