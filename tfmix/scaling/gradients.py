"""From scaled 16-bit gradients to true float32 ones."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix import _formats
from tfmix.scaling import finite


def unscale_all(
    grads: Sequence[Any], variables: Sequence[Any], scale: Any
) -> list[Any]:
    """Divides a step's gradients by the loss scale.

    Args:
        grads: Scaled gradients; a `None` stays `None`.
        variables: The variables they belong to. A gradient that overwrites
            its variable (Keras's float8 training computes new scales that
            way) is a value, not a gradient: it is returned as it is.
        scale: Float32 scalar.

    Returns:
        A list of the gradients, 16-bit ones as float32.
    """
    return [
        gradient
        if gradient is None or getattr(v, "overwrite_with_gradient", False)
        else unscale(gradient, scale)
        for gradient, v in zip(grads, variables, strict=True)
    ]


def unscale(gradient: Any, scale: Any) -> Any:
    """Divides one gradient by the loss scale, in float32 or wider.

    Args:
        gradient: Tensor or `tf.IndexedSlices` of any float dtype.
        scale: Float32 scalar.

    Returns:
        The gradient, of the same kind; float32 where it was 16-bit.
    """
    if finite.is_sparse(gradient):
        values = unscale(gradient.values, scale)
        return type(gradient)(values, gradient.indices, gradient.dense_shape)
    gradient = to_float32(gradient)
    return ops.divide(gradient, ops.cast(scale, gradient.dtype))


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
