"""A product of a tensor and a weight, with a letter for each axis."""

import dataclasses
import functools
import string
from collections.abc import Sequence

_UNUSED = string.ascii_letters
# The ops that multiply matrices.
OPS = frozenset(("matmul", "dot", "inner", "tensordot", "einsum"))
# The letters of both factors, and of the result.
Letters = tuple[str, str, str]


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
    def order(self) -> str:
        """The letters of the result as compilers order them."""
        return self.batch + self.free + self.new

    @functools.cached_property
    def of_inputs(self) -> "Contraction":
        """The product of upstream and weight: the gradient of the tensor."""
        return Contraction(self.outputs, self.weight, self.inputs)

    @functools.cached_property
    def of_weight(self) -> "Contraction":
        """The product of tensor and upstream: the gradient of the weight."""
        return Contraction(self.inputs, self.outputs, self.weight)

    @functools.cached_property
    def turned(self) -> "Contraction":
        """The same with the factors in the other order."""
        return Contraction(self.weight, self.inputs, self.outputs)

    @functools.cached_property
    def positions(self) -> tuple:
        """The summed axes of both factors, and their batch axes."""
        sides = self.inputs, self.weight
        return tuple(
            tuple(tuple(map(side.index, letters)) for side in sides)
            for letters in (self.summed, self.batch)
        )

    @functools.cached_property
    def is_product(self) -> bool:
        """Returns whether it is a product of matrices, or a batch of them."""
        return bool(
            self.summed
            and len(set(self.inputs)) == len(self.inputs)
            and len(set(self.weight)) == len(self.weight)
            and sorted(self.outputs) == sorted(self.order)
        )

    @functools.cached_property
    def is_of_matrices(self) -> bool:
        """Returns whether it is a product of two matrices."""
        sides = self.inputs, self.weight, self.outputs
        return self.is_product and all(len(side) == 2 for side in sides)


def of_op(
    name: str, args: Sequence, kwargs: dict, shapes: Sequence, weight_at: int
) -> Contraction | None:
    """Returns the axes of an op of two factors.

    Args:
        name: The name of the op.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        shapes: The shapes of both factors.
        weight_at: Which factor is the weight, 0 or 1.

    Returns:
        The axes; `None` if it is no product of matrices, or of stacks of them
        that are not alike.
    """
    first, second = shapes
    ranks = len(first), len(second)
    letters: Letters | None = None
    if name == "einsum" and isinstance(args[0], str):
        letters = _of_einsum(args[0], ranks)
    elif name == "tensordot":
        axes = kwargs.get("axes", args[2] if len(args) > 2 else 2)
        letters = _of_tensordot(ranks, axes)
    elif name == "dot" and 0 not in ranks:
        # Beyond two axes it keeps those of both factors, where `matmul` has
        # stacks.
        letters = _of_tensordot(ranks, (-1, -1 if ranks[1] == 1 else -2))
    elif name == "inner" and 0 not in ranks:
        letters = _of_tensordot(ranks, (-1, -1))
    elif name == "matmul" and _are_alike(first[:-2], second[:-2]):
        letters = _of_matmul(ranks)
    return None if letters is None else _in_order(*letters, weight_at)


# A layer multiplies by the same axes in each call, so what follows from them
# is found once.
@functools.cache
def _of_matmul(ranks: tuple[int, int]) -> Letters | None:
    if 0 in ranks:
        return None
    # A matrix times a stack of matrices is repeated over the stack.
    outer = _UNUSED[: max(max(ranks) - 2, 0)]
    stacks = [outer[len(outer) - max(rank - 2, 0) :] for rank in ranks]
    row, column = "Y" * (ranks[0] > 1), "Z" * (ranks[1] > 1)
    left, right = stacks[0] + row + "X", stacks[1] + "X" + column
    return left, right, outer + row + column


def _are_alike(first: Sequence, second: Sequence) -> bool:
    """Returns whether no axis that both stacks have is repeated."""
    pairs = zip(first[::-1], second[::-1], strict=False)
    return all(one == other for one, other in pairs)


def _of_tensordot(ranks: tuple[int, int], axes: int | Sequence) -> Letters:
    """Takes the number of axes to sum, or the axes of each factor."""
    if isinstance(axes, int):
        pairs = [
            (ranks[0] - axes + place, place) for place in range(max(axes, 0))
        ]
    else:
        both = [[x] if isinstance(x, int) else list(x) for x in axes]
        pairs = list(zip(*both, strict=True))
    left = list(_UNUSED[: ranks[0]])
    right = list(_UNUSED[ranks[0] : sum(ranks)])
    for first, second in pairs:
        right[second] = left[first]
    outputs = [x for x in left if x not in right]
    outputs += [x for x in right if x not in left]
    return "".join(left), "".join(right), "".join(outputs)


@functools.cache
def _of_einsum(equation: str, ranks: tuple[int, int]) -> Letters | None:
    equation = equation.replace(" ", "")
    if equation.count("->") != 1 or equation.count(",") != 1:
        return None
    factors, outputs = equation.split("->")
    sides = factors.split(",")
    # Axes of two factors that are not named may be repeated.
    if factors.count("...") > 1:
        return None
    unused = [x for x in _UNUSED if x not in equation]
    named = equation.split("->")[0].replace("...", "").split(",")
    for rank, side, own in zip(ranks, sides, named, strict=True):
        if "..." in side:
            unused = unused[: rank - len(own)]
    left, right, result = (
        side.replace("...", "".join(unused)) for side in (*sides, outputs)
    )
    return left, right, result


@functools.cache
def _in_order(
    left: str, right: str, outputs: str, weight_at: int
) -> Contraction | None:
    sides = left, right
    found = Contraction(sides[1 - weight_at], sides[weight_at], outputs)
    return found if found.is_product else None
