"""How far a running layer's output lies from the same in float32."""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats
from tfmix.doctor import probe

# A rounding moves a value by up to half an epsilon; over all values that is a
# fifth of one, in the mean of squares. As much comes of the half of them that
# is moved here, each by the root of two more.
_MEAN_ROUNDING = 0.2 * 2**0.5
# Turns neighbouring places into angles far apart.
_SHUFFLE = 12.9898


def unrounded(tensor: Any, operation: Any, limits: _formats.Format) -> Any:
    """Returns what a 16-bit input may have been before it was rounded.

    A layer that subtracts a large offset enlarges that rounding. Ids of an
    embedding were never rounded, nor was what the format holds with a bit to
    spare, such as a -1 that marks what is masked.
    """
    exact = ops.cast(tensor, "float32")
    is_lookup = isinstance(operation, keras.layers.Embedding)
    if probe.dtype(tensor) not in _formats.SIXTEEN_BIT or is_lookup:
        return exact
    # Up or down by the place: what was rounded to one value differed before.
    places = ops.cast(ops.arange(ops.size(exact)), "float32")
    signs = ops.sign(ops.sin(places * _SHUFFLE))
    step = limits.epsilon * _MEAN_ROUNDING
    moved = exact * (1.0 + step * ops.reshape(signs, ops.shape(exact)))
    # Those with a last digit of zero in the format, by Dekker's split:
    # float32's 24 bits less those that this shifts out.
    shifted = exact * (2.0**24 * limits.epsilon + 1.0)
    is_short = shifted - (shifted - exact) == exact
    return ops.where(is_short, exact, moved)


def error(found: Any, exact: Any) -> Any:
    """Returns the relative error, and whether float32 is not finite.

    A float32 tensor of shape `(2,)`; the error is infinite where a value is
    finite in float32 alone.
    """
    found = ops.cast(found, "float32")
    fine, alike = ops.isfinite(exact), ops.isfinite(found)
    right = ops.where(fine, exact, 0.0)
    largest = ops.max(ops.abs(right))
    # In units of the largest value: squares of 1e30 leave float32's range.
    unit = ops.where(largest > 0, largest, 1.0)
    wrong = ops.where(fine & alike, found - right, 0.0) / unit
    size = ops.sum(ops.square(right / unit))
    error = ops.sqrt(ops.sum(ops.square(wrong)) / ops.maximum(size, 1e-30))
    error = ops.where(ops.any(fine & ~alike), np.float32(np.inf), error)
    return ops.stack([error, ops.cast(~ops.all(fine), "float32")])
