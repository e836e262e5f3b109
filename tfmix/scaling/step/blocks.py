"""Gradients of one shape joined into a block, so a step costs few operations.

A model of hundreds of small variables has few distinct shapes. Dividing and
checking each gradient apart takes several operations a variable, and each
operation costs more than its arithmetic.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from keras import ops

from tfmix._keras import compilation
from tfmix.scaling.step import finite, unscale

# Elements of a gradient that is still worth copying to save operations. At
# 2**14 (64 KiB of float32) a copy costs about what one operation does.
_SMALL = 2**14


@dataclasses.dataclass(frozen=True)
class Block:
    """Gradients of the same shape, stacked; or one that stands alone.

    Attributes:
        tensor: The gradients, stacked along a new first axis if several.
        positions: Which gradients of the step these are.
        is_true: Whether it is not to be divided: it was already, or it
            overwrites its variable and is no gradient.
    """

    tensor: Any
    positions: tuple[int, ...]
    is_true: bool = False

    @property
    def is_stack(self) -> bool:
        """Whether the first axis counts gradients."""
        return len(self.positions) > 1


def joined(
    grads: Sequence[Any],
    variables: Sequence[Any],
    true: Collection[int] = (),
) -> list[Block]:
    """Joins a step's gradients and widens 16-bit ones; `None`s are left out.

    Those at the positions `true`, of those `alone`, are not scaled any more.
    """
    return [
        _block(grads, variables, positions, positions[0] in true)
        for positions in _groups(grads, variables)
    ]


def alone(grads: Sequence[Any], variables: Sequence[Any]) -> frozenset[int]:
    """Returns the positions of gradients that `joined` leaves as they are."""
    return frozenset(
        position
        for position, *others in _groups(grads, variables)
        if not others
        and not unscale.is_overwritten(variables[position])
        and not unscale.is_16bit(grads[position])
    )


def apart(grads: Sequence[Any], variables: Sequence[Any]) -> list[Block]:
    """Does what `joined` does, with each gradient in a block of its own."""
    return [
        _block(grads, variables, (position,))
        for position, gradient in enumerate(grads)
        if gradient is not None
    ]


def divided(blocks: Sequence[Block], scale: Any) -> list[Block]:
    """Returns the blocks of true gradients.

    Args:
        blocks: The gradients' blocks.
        scale: Float32 scalar, or `None` if they were divided already.
    """
    if scale is None:
        return list(blocks)
    if compilation.by_xla():
        # The reciprocal of a constant beyond 2^126 would be folded to zero.
        scale = compilation.kept_apart(scale)
    scaled = [block.tensor for block in blocks if not block.is_true]
    true = iter(unscale.unscale(scaled, scale))
    return [
        block
        if block.is_true
        else dataclasses.replace(block, tensor=next(true))
        for block in blocks
    ]


def unscaled(
    grads: Sequence[Any], variables: Sequence[Any], scale: Any
) -> list[Block]:
    """Returns the blocks of true gradients, with NaN for any infinity."""
    return [
        block
        if block.is_true
        else dataclasses.replace(
            block, tensor=unscale.without_infinities(block.tensor)
        )
        for block in divided(joined(grads, variables), scale)
    ]


def parts(blocks: Sequence[Block], count: int) -> list[Any]:
    """Returns the gradients in their own order, `None` where there is none."""
    result: list[Any] = [None] * count
    for block in blocks:
        tensors = [block.tensor]
        if block.is_stack:
            tensors = ops.unstack(block.tensor, num=len(block.positions))
        for position, tensor in zip(block.positions, tensors, strict=True):
            result[position] = tensor
    return result


def all_finite(blocks: Sequence[Block]) -> Any:
    """Returns a boolean scalar: is every number of every block finite?"""
    return finite.all_finite([block.tensor for block in blocks])


def not_finite(blocks: Sequence[Block], count: int) -> Any:
    """Returns a boolean vector, true for each gradient that is not finite.

    Args:
        blocks: The blocks of a step.
        count: Integer, the number of gradients, absent ones included.
    """
    flags = [_bad_ones(block) for block in blocks]
    order = [position for block in blocks for position in block.positions]
    absent = sorted(set(range(count)) - set(order))
    if absent:
        flags.append(ops.zeros((len(absent),), "bool"))
    order += absent
    inverse = sorted(range(count), key=order.__getitem__)
    return ops.take(ops.concatenate(flags), inverse)


def _bad_ones(block: Block) -> Any:
    if not block.is_stack:
        return ops.reshape(
            ops.logical_not(finite.is_finite(block.tensor)), (1,)
        )
    axes = tuple(range(1, len(block.tensor.shape)))
    return ops.logical_not(ops.all(ops.isfinite(block.tensor), axis=axes))


def _block(
    grads: Sequence[Any],
    variables: Sequence[Any],
    positions: tuple[int, ...],
    is_true: bool = False,
) -> Block:
    tensor = grads[positions[0]]
    if len(positions) > 1:
        tensor = ops.stack([grads[position] for position in positions])
    if unscale.is_overwritten(variables[positions[0]]):
        return Block(tensor, positions, is_true=True)
    return Block(unscale.widened(tensor), positions, is_true)


def _groups(
    grads: Sequence[Any], variables: Sequence[Any]
) -> list[tuple[int, ...]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for position, gradient in enumerate(grads):
        if gradient is not None:
            overwrites = unscale.is_overwritten(variables[position])
            joins = _is_small(gradient) and not overwrites
            # A gradient that joins no other is a group of its own.
            kind = position if not joins else _kind(gradient)
            groups[kind].append(position)
    return [tuple(positions) for positions in groups.values()]


def _kind(gradient: Any) -> tuple[Any, ...]:
    return (tuple(gradient.shape), str(gradient.dtype))


def _is_small(gradient: Any) -> bool:
    if finite.is_sparse(gradient):
        return False
    shape = tuple(gradient.shape)
    return None not in shape and math.prod(shape) <= _SMALL
