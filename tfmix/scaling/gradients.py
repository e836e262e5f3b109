"""From scaled 16-bit gradients to true float32 ones."""

from typing import Any

import keras
from keras import ops

from tfmix import _formats
from tfmix.scaling import compiled, finite

# Beyond 2^126 a scale's reciprocal is subnormal, which XLA flushes to zero.
_HALFWAY = 2.0**64


def unscale(gradient: Any, scale: Any) -> Any:
    """Divides one gradient by the loss scale, in float32 or wider.

    Args:
        gradient: Tensor or `tf.IndexedSlices` of any float dtype.
        scale: Float32 scalar.

    Returns:
        The gradient, of the same kind; float32 where it was 16-bit. Under
        XLA it is multiplied by the reciprocal, which rounds once more where
        the scale is no power of two.
    """
    gradient = widened(gradient)
    if finite.is_sparse(gradient):
        values = unscale(gradient.values, scale)
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    scale = ops.cast(scale, gradient.dtype)
    if compiled.by_xla():
        return _multiplied(gradient, scale)
    return ops.divide(gradient, scale)


def _multiplied(gradient: Any, scale: Any) -> Any:
    # XLA repeats a product in every kernel that reads it, where a division
    # gets a kernel and a tensor of its own. Exact for powers of two.
    is_huge = scale > _HALFWAY
    lowered = ops.where(is_huge, scale / _HALFWAY, scale)
    # No second factor: XLA would join the two.
    gradient = ops.where(is_huge, gradient / _HALFWAY, gradient)
    return gradient * (1.0 / lowered)


def widened(gradient: Any) -> Any:
    """Returns a gradient, dense or sparse, in float32 if it was 16-bit."""
    if not finite.is_sparse(gradient):
        return to_float32(gradient)
    if not is_16bit(gradient):
        return gradient
    values = to_float32(gradient.values)
    return type(gradient)(values, gradient.indices, gradient.dense_shape)


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
