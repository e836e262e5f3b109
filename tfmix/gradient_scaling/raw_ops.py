"""TensorFlow's raw ops, under the names and with the order of `jax.numpy`.

They take tensors of one dtype, and Python numbers. In eager mode the ops of
Keras and TensorFlow first convert their arguments, which takes several times as
long as the op.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def _ordered(op: Callable, *names: str) -> Callable[..., Any]:
    """Returns a raw op that takes its arguments by position."""

    def ordered(*args: Any) -> Any:
        return op(**dict(zip(names, args, strict=True)))

    return ordered


def max(x: Any, initial: Any) -> Any:
    """Returns the largest number of a tensor; that of none is -infinity."""
    del initial
    return tf.reduce_max(x)


_raw = tf.raw_ops
abs = tf.abs
sum = tf.reduce_sum
add = _ordered(_raw.AddV2, "x", "y")
subtract = _ordered(_raw.Sub, "x", "y")
multiply = _ordered(_raw.Mul, "x", "y")
divide = _ordered(_raw.RealDiv, "x", "y")
maximum = _ordered(_raw.Maximum, "x", "y")
right_shift = _ordered(_raw.RightShift, "x", "y")
left_shift = _ordered(_raw.LeftShift, "x", "y")
greater = _ordered(_raw.Greater, "x", "y")
where = _ordered(_raw.SelectV2, "condition", "t", "e")
clip = _ordered(_raw.ClipByValue, "t", "clip_value_min", "clip_value_max")
