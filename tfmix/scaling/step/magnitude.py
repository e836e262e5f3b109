"""A bound on every number of a step's gradients, in one pass over each.

TensorFlow's `l2_loss` sums squares in one multithreaded pass, without a
tensor in between; `isfinite` and `all` take two. The sum is infinite or NaN
if any number is. It also is where squares overflow, from 1e19 on, so that
only a finite bound is an answer; any other calls for the exact check.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmix.scaling.step import blocks, finite

# Half of float32's largest: rounding errors of the sum do not reach that far.
_SAFE = 1.7e38


def surely_finite(step: Sequence[blocks.Block], scale: Any) -> Any:
    """Returns a boolean scalar, false if a closer look is needed.

    Args:
        step: The blocks of scaled gradients, in float32 or wider.
        scale: Float32 scalar that they are to be divided by.

    Returns:
        True only if all gradients, all sums of the rows of sparse ones and
        all of their quotients by the scale are finite.
    """
    squares = tf.add_n([_squares(block) for block in step])
    # A scale below 1, which `min_scale` allows, makes gradients larger.
    return tf.sqrt(squares) / tf.minimum(scale, 1.0) < _SAFE


def _squares(block: blocks.Block) -> Any:
    """Returns at least the square of any of the block's numbers, float32."""
    bound = block.recipe.squares() if block.recipe else None
    if bound is not None:
        return bound
    tensor = block.tensor
    if finite.is_sparse(tensor):
        # By Cauchy's and Schwarz's inequality no sum of some rows exceeds the
        # norm of all, multiplied by the root of their number.
        rows = tf.cast(tf.shape(tensor.values)[0], tf.float32)
        return 2.0 * rows * tf.cast(tf.nn.l2_loss(tensor.values), tf.float32)
    if keras.backend.standardize_dtype(tensor.dtype) in ("float32", "float64"):
        return 2.0 * tf.cast(tf.nn.l2_loss(tensor), tf.float32)
    # An overwriting value in a narrow format, where squares lose all meaning.
    return tf.where(finite.is_finite(tensor), 0.0, float("inf"))
