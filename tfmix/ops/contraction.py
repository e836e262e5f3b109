"""A product of a tensor and a weight, with a letter for each axis."""

import dataclasses
import functools
import string
from collections.abc import Sequence

_UNUSED = string.ascii_letters


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
        return "".join(x for x in self._shared if x in self.outputs)

    @functools.cached_property
    def summed(self) -> str:
        """The letters that both factors have, but not the result."""
        return "".join(x for x in self._shared if x not in self.outputs)

    @functools.cached_property
    def free(self) -> str:
        """The letters that only the tensor and the result have."""
        return "".join(x for x in self.inputs if x not in self.weight)

    @functools.cached_property
    def new(self) -> str:
        """The letters that only the weight and the result have."""
        return "".join(x for x in self.weight if x not in self.inputs)

    @functools.cached_property
    def of_inputs(self) -> "Contraction":
        """The product of upstream and weight: the gradient of the tensor."""
        return Contraction(self.outputs, self.weight, self.inputs)

    @functools.cached_property
    def of_weight(self) -> "Contraction":
        """The product of tensor and upstream: the gradient of the weight."""
        return Contraction(self.inputs, self.outputs, self.weight)

    @functools.cached_property
    def positions(self) -> tuple:
        """The summed axes of both factors, and their batch axes."""
        sides = self.inputs, self.weight
        return tuple(
            tuple(tuple(map(side.index, letters)) for side in sides)
            for letters in (self.summed, self.batch)
        )

    @functools.cached_property
    def _shared(self) -> str:
        return "".join(x for x in self.inputs if x in self.weight)

    @functools.cached_property
    def is_product(self) -> bool:
        """Returns whether it is a product of matrices, or a batch of them."""
        kept = self.batch + self.free + self.new
        return bool(
            self.summed
            and len(set(self.inputs)) == len(self.inputs)
            and len(set(self.weight)) == len(self.weight)
            and sorted(self.outputs) == sorted(kept)
        )


# A layer multiplies by the same axes in each call, so what follows from them
# is found once.
@functools.cache
def of_matmul(ranks: tuple[int, int], weight_at: int) -> Contraction | None:
    """Returns the axes that `matmul` sums; `None` if ranks make it broadcast.

    Args:
        ranks: The ranks of both factors.
        weight_at: Which factor is the weight, 0 or 1.
    """
    rank = max(ranks)
    if 0 in ranks or (ranks[0] != ranks[1] and min(ranks) > 2):
        return None
    # A matrix times a stack of matrices is repeated over the stack.
    outer = _UNUSED[: rank - 2] if rank > 2 else ""
    stacks = [outer if r > 2 else "" for r in ranks]
    left = stacks[0] + ("Y" if ranks[0] > 1 else "") + "X"
    right = stacks[1] + "X" + ("Z" if ranks[1] > 1 else "")
    outputs = outer + left.replace("X", "")[len(stacks[0]) :]
    outputs += right.replace("X", "")[len(stacks[1]) :]
    return _in_order((left, right), outputs, weight_at)


def of_dot(ranks: Sequence[int], weight_at: int) -> Contraction | None:
    """Returns the axes that `dot` sums; `None` if a factor is a number.

    Beyond two axes it keeps those of both factors, where `matmul` has a batch.

    Args:
        ranks: The ranks of both factors.
        weight_at: Which factor is the weight, 0 or 1.
    """
    if 0 in ranks:
        return None
    summed = -1 if ranks[1] == 1 else -2
    return of_tensordot(ranks, (-1, summed), weight_at)


def of_tensordot(
    ranks: Sequence[int], axes: int | Sequence, weight_at: int
) -> Contraction | None:
    """Returns the axes that `tensordot` sums.

    Args:
        ranks: The ranks of both factors.
        axes: The number of axes to sum, or the axes of each factor.
        weight_at: Which factor is the weight, 0 or 1.
    """
    if isinstance(axes, int):
        pairs = [
            (ranks[0] - axes + place, place) for place in range(max(axes, 0))
        ]
    else:
        both = [[x] if isinstance(x, int) else list(x) for x in axes]
        pairs = list(zip(*both, strict=True))
    left = list(_UNUSED[: ranks[0]])
    right = list(_UNUSED[ranks[0] : ranks[0] + ranks[1]])
    for first, second in pairs:
        right[second] = left[first]
    outputs = [x for x in left if x not in right]
    outputs += [x for x in right if x not in left]
    return _in_order(
        ("".join(left), "".join(right)), "".join(outputs), weight_at
    )


@functools.cache
def of_einsum(
    equation: str, ranks: tuple[int, int], weight_at: int
) -> Contraction | None:
    """Returns the axes that an einsum of two factors sums.

    Args:
        equation: An equation that `keras.ops.einsum` accepts.
        ranks: The ranks of both factors.
        weight_at: Which factor is the weight, 0 or 1.
    """
    equation = equation.replace(" ", "")
    if equation.count("->") != 1 or equation.count(",") != 1:
        return None
    factors, outputs = equation.split("->")
    sides = factors.split(",")
    if "..." in sides[weight_at]:
        return None
    named = len(sides[1 - weight_at].replace("...", ""))
    unused = [x for x in _UNUSED if x not in equation]
    more = "".join(unused[: ranks[1 - weight_at] - named])
    left, right = (side.replace("...", more) for side in sides)
    outputs = outputs.replace("...", more)
    return _in_order((left, right), outputs, weight_at)


def _in_order(
    sides: tuple[str, str], outputs: str, weight_at: int
) -> Contraction | None:
    found = Contraction(sides[1 - weight_at], sides[weight_at], outputs)
    return found if found.is_product else None
