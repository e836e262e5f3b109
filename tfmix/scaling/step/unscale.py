"""From scaled 16-bit gradients to true float32 ones.

Those of one shape are joined into blocks, so that a step costs few operations:
hundreds of variables have few shapes.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from keras import ops

from tfmix._keras import compilation
from tfmix._keras import variables as keras_variables
from tfmix.scaling.step import finite

# Elements of a gradient that is still worth copying to save operations. At
# 2**14 (64 KiB of float32) a copy costs about what one operation does.
_SMALL = 2**14
# Beyond 2^126 a scale's reciprocal is subnormal, which XLA flushes to zero.
_HALFWAY = 2.0**64


def unscale(grads: Sequence, scale: Any) -> list:
    """Divides gradients, dense or sparse, in float32 or wider."""
    # Under XLA they are multiplied by the reciprocal, which rounds once more
    # where the scale is no power of two.
    divide = (
        _by_reciprocal(scale)
        if compilation.by_xla()
        else (lambda tensor: ops.divide(tensor, ops.cast(scale, tensor.dtype)))
    )
    return [_on_values(divide, widened(gradient)) for gradient in grads]


def _by_reciprocal(scale: Any) -> Callable[[Any], Any]:
    # XLA repeats a product in every kernel that reads it, where a division
    # gets a kernel and a tensor of its own. Exact for powers of two.
    is_huge = ops.greater(scale, _HALFWAY)
    lowered = ops.where(is_huge, scale / _HALFWAY, scale)

    # All gradients share the scalars: each operation takes time to compile.
    @functools.cache
    def reciprocal(dtype: Any) -> Any:
        return 1.0 / ops.cast(lowered, dtype)

    def multiplied(tensor: Any) -> Any:
        # No second factor: XLA would join the two.
        tensor = ops.where(is_huge, tensor / _HALFWAY, tensor)
        return tensor * reciprocal(tensor.dtype)

    return multiplied


def without_infinities(tensor: Any) -> Any:
    """Returns a float tensor, dense or sparse, with NaN for infinity."""
    return _on_values(
        lambda each: ops.where(ops.isfinite(each), each, float("nan")), tensor
    )


def _on_values(function: Callable[[Any], Any], tensor: Any) -> Any:
    if not finite.is_sparse(tensor):
        return function(tensor)
    values = function(tensor.values)
    return type(tensor)(values, tensor.indices, tensor.dense_shape)


def widened(gradient: Any) -> Any:
    """Returns a gradient, dense or sparse, in float32 if it was 16-bit."""
    narrow = keras_variables.is_narrow(gradient)
    return _on_values(to_float32, gradient) if narrow else gradient


def to_float32(tensor: Any) -> Any:
    """Widens a 16-bit float tensor; leaves every other tensor alone."""
    narrow = keras_variables.is_narrow(tensor)
    return ops.cast(tensor, "float32") if narrow else tensor


class Block(NamedTuple):
    """Gradients of the same shape, stacked on a new axis; or a single one."""

    tensor: Any
    positions: tuple[int, ...]  # Which gradients of the step these are.
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
        and not keras_variables.is_overwritten(variables[position])
        and not keras_variables.is_narrow(grads[position])
    )


def one_by_one(grads: Sequence, variables: Sequence, scale: Any) -> list:
    """Returns the true gradients, none joined: each fuses with its update."""
    present = [n for n, gradient in enumerate(grads) if gradient is not None]
    blocks = [_block(grads, variables, (position,)) for position in present]
    return parts(divided(blocks, scale), len(grads))


def divided(blocks: Sequence[Block], scale: Any) -> list[Block]:
    """Returns the blocks of true gradients; a scale of `None` is none."""
    if scale is None:
        return list(blocks)
    if compilation.by_xla():
        # The reciprocal of a constant beyond 2^126 would be folded to zero.
        scale = compilation.kept_apart(scale)
    scaled = [block.tensor for block in blocks if not block.is_true]
    true = iter(unscale(scaled, scale))
    return [
        block if block.is_true else block._replace(tensor=next(true))
        for block in blocks
    ]


def unscaled(grads: Sequence, variables: Sequence, scale: Any) -> list[Block]:
    """Returns the blocks of true gradients, with NaN for any infinity."""
    return [
        block
        if block.is_true
        else block._replace(tensor=without_infinities(block.tensor))
        for block in divided(joined(grads, variables), scale)
    ]


def norm(true: Sequence, variables: Sequence) -> Any:
    """Returns the float32 norm of all true gradients together."""
    # What overwrites its variable is no gradient.
    squares = [
        ops.sum(ops.square(ops.cast(finite.summed(gradient), "float32")))
        for gradient, variable in zip(true, variables, strict=True)
        if gradient is not None and not keras_variables.is_overwritten(variable)
    ]
    return ops.sqrt(sum(squares, ops.zeros(())))


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
    if absent := sorted(set(range(count)) - set(order)):
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
    positions: tuple,
    is_true: bool = False,
) -> Block:
    tensor = grads[positions[0]]
    if len(positions) > 1:
        tensor = ops.stack([grads[position] for position in positions])
    if keras_variables.is_overwritten(variables[positions[0]]):
        return Block(tensor, positions, is_true=True)
    return Block(widened(tensor), positions, is_true)


def _groups(grads: Sequence, variables: Sequence) -> list[tuple[int, ...]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for position, gradient in enumerate(grads):
        if gradient is not None:
            overwrites = keras_variables.is_overwritten(variables[position])
            # A gradient that joins no other is a group of its own.
            kind: Any = position
            if _is_small(gradient) and not overwrites:
                kind = (tuple(gradient.shape), str(gradient.dtype))
            groups[kind].append(position)
    return [tuple(positions) for positions in groups.values()]


def _is_small(gradient: Any) -> bool:
    if finite.is_sparse(gradient):
        return False
    shape = tuple(gradient.shape)
    return None not in shape and math.prod(shape) <= _SMALL
