"""From scaled 16-bit gradients to true float32 ones."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfmix import _formats
from tfmix._keras import compilation
from tfmix.scaling.step import finite

# Beyond 2^126 a scale's reciprocal is subnormal, which XLA flushes to zero.
_HALFWAY = 2.0**64


def unscale(grads: Sequence, scale: Any) -> list:
    """Divides gradients, dense or sparse, in float32 or wider."""
    # Under XLA they are multiplied by the reciprocal, which rounds once more
    # where the scale is no power of two.
    by = _by_reciprocal if compilation.by_xla() else _by_quotient
    divide = by(scale)
    return [_on_values(divide, widened(gradient)) for gradient in grads]


def _by_quotient(scale: Any) -> Callable[[Any], Any]:
    return lambda tensor: ops.divide(tensor, ops.cast(scale, tensor.dtype))


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
    return _on_values(to_float32, gradient) if is_16bit(gradient) else gradient


def to_float32(tensor: Any) -> Any:
    """Widens a 16-bit float tensor; leaves every other tensor alone."""
    if is_16bit(tensor):
        return ops.cast(tensor, "float32")
    return tensor


def is_16bit(tensor: Any) -> bool:
    """Returns whether the tensor's dtype is float16 or bfloat16."""
    dtype = getattr(tensor, "dtype", None)
    if dtype is None:
        return False
    return keras.backend.standardize_dtype(dtype) in _formats.SIXTEEN_BIT


def is_overwritten(variable: Any) -> bool:
    """Returns whether a variable's gradient is its next value (float8)."""
    return getattr(variable, "overwrite_with_gradient", False)
