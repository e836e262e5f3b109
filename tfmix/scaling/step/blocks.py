"""Gradients of one shape joined into a block, so a step costs few operations.

Hundreds of small variables have few distinct shapes, and each operation on one
of them costs more than its arithmetic.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from keras import ops

from tfmix._keras import compilation
from tfmix.scaling.step import finite, unscale

# Elements of a gradient that is still worth copying to save operations. At
# 2**14 (64 KiB of float32) a copy costs about what one operation does.
_SMALL = 2**14


class Block(NamedTuple):
    """Gradients of the same shape, stacked on a new axis; or a single one."""

    tensor: Any
    # Which gradients of the step these are.
    positions: tuple[int, ...]
    # Not to be divided: it was already, or it overwrites its variable.
    is_true: bool = False


def joined(
    grads: Sequence, variables: Sequence, true: Collection[int] = ()
) -> list[Block]:
    """Joins gradients and widens 16-bit ones; those `true` are divided."""
    return [
        _block(grads, variables, positions, positions[0] in true)
        for positions in _groups(grads, variables)
    ]


def alone(grads: Sequence, variables: Sequence) -> frozenset[int]:
    """Returns the positions of gradients that `joined` leaves as they are."""
    return frozenset(
        position
        for position, *others in _groups(grads, variables)
        if not others
        and not unscale.is_overwritten(variables[position])
        and not unscale.is_16bit(grads[position])
    )


def apart(grads: Sequence, variables: Sequence) -> list[Block]:
    """Does what `joined` does, with each gradient in a block of its own."""
    present = [n for n, gradient in enumerate(grads) if gradient is not None]
    return [_block(grads, variables, (position,)) for position in present]


def divided(blocks: Sequence[Block], scale: Any) -> list[Block]:
    """Returns the blocks of true gradients; a scale of `None` is none."""
    if scale is None:
        return list(blocks)
    if compilation.by_xla():
        # The reciprocal of a constant beyond 2^126 would be folded to zero.
        scale = compilation.kept_apart(scale)
    scaled = [block.tensor for block in blocks if not block.is_true]
    true = iter(unscale.unscale(scaled, scale))
    return [
        block if block.is_true else block._replace(tensor=next(true))
        for block in blocks
    ]


def unscaled(grads: Sequence, variables: Sequence, scale: Any) -> list[Block]:
    """Returns the blocks of true gradients, with NaN for any infinity."""
    return [
        block
        if block.is_true
        else block._replace(tensor=unscale.without_infinities(block.tensor))
        for block in divided(joined(grads, variables), scale)
    ]


def parts(blocks: Sequence[Block], count: int) -> list:
    """Returns the gradients in their own order, `None` where there is none."""
    result: list = [None] * count
    for tensor, positions, _ in blocks:
        several = len(positions) > 1
        tensors = ops.unstack(tensor, len(positions)) if several else [tensor]
        for position, part in zip(positions, tensors, strict=True):
            result[position] = part
    return result


def all_finite(blocks: Sequence[Block]) -> Any:
    """Returns a boolean scalar: is every number of every block finite?"""
    return finite.all_finite([block.tensor for block in blocks])


def not_finite(blocks: Sequence[Block], count: int) -> Any:
    """Returns a boolean vector: which of `count` gradients are not finite?"""
    flags = [ops.logical_not(_finite_ones(block)) for block in blocks]
    order = [position for block in blocks for position in block.positions]
    absent = sorted(set(range(count)) - set(order))
    if absent:
        flags.append(ops.zeros((len(absent),), "bool"))
    order += absent
    inverse = sorted(range(count), key=order.__getitem__)
    return ops.take(ops.concatenate(flags), inverse)


def _finite_ones(block: Block) -> Any:
    tensor = block.tensor
    if len(block.positions) == 1:
        return ops.reshape(finite.is_finite(tensor), (1,))
    axes = tuple(range(1, len(tensor.shape)))
    return ops.all(ops.isfinite(tensor), axis=axes)


def _block(
    grads: Sequence,
    variables: Sequence,
    positions: tuple[int, ...],
    is_true: bool = False,
) -> Block:
    tensor = grads[positions[0]]
    if len(positions) > 1:
        tensor = ops.stack([grads[position] for position in positions])
    if unscale.is_overwritten(variables[positions[0]]):
        return Block(tensor, positions, is_true=True)
    return Block(unscale.widened(tensor), positions, is_true)


def _groups(grads: Sequence, variables: Sequence) -> list[tuple[int, ...]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for position, gradient in enumerate(grads):
        if gradient is not None:
            overwrites = unscale.is_overwritten(variables[position])
            joins = _is_small(gradient) and not overwrites
            # A gradient that joins no other is a group of its own.
            kind = (tuple(gradient.shape), str(gradient.dtype))
            groups[kind if joins else position].append(position)
    return [tuple(positions) for positions in groups.values()]


def _is_small(gradient: Any) -> bool:
    if finite.is_sparse(gradient):
        return False
    shape = tuple(gradient.shape)
    return None not in shape and math.prod(shape) <= _SMALL
