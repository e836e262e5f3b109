"""Is every number of a nest of tensors finite?"""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops, tree

from tfmix._keras import compilation

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

# The most rows that XLA's `TreeReductionRewriter` leaves in one piece, and a
# size below which a check costs no more than its start.
_MOST_ROWS, _FEW = 32, 2**14
# Half of float32's largest: rounding errors of a sum do not reach that far.
_SAFE = 1.7e38


def all_finite(tensors: Any) -> Any:
    """Returns whether no tensor holds an infinity or a NaN.

    Reads each tensor once and copies nothing to the host. Sparse gradients
    (`tf.IndexedSlices`) are checked on their values and on the sums of the
    rows that several values share, never as a dense tensor.

    Args:
        tensors: A tensor, or any nest of lists, tuples and dicts of tensors
            and `None`s, of any shape and dtype. Integers count as finite.

    Returns:
        A boolean scalar tensor; true for an empty nest.

    Example:
        >>> bool(all_finite({"a": [1.0, 2.0], "b": None}))
        True
        >>> bool(all_finite([1.0, float("inf")]))
        False
    """
    flags = [
        is_finite(leaf if is_sparse(leaf) else ops.convert_to_tensor(leaf))
        for leaf in tree.flatten(tensors)
        if leaf is not None
    ]
    if not flags:
        return ops.convert_to_tensor(True)
    return flags[0] if len(flags) == 1 else ops.all(ops.stack(flags))


def surely_finite(tensors: Sequence, scale: Any) -> Any:
    """Returns a boolean scalar, false if a closer look is needed (TensorFlow).

    True only if all gradients (float32 or wider), all sums of the rows of
    sparse ones and all of their quotients by the scale, if any, are finite.
    TensorFlow's `l2_loss` sums squares in one multithreaded pass, without a
    tensor in between; `isfinite` and `all` take two. The sum is infinite or
    NaN if any number is, but also where squares overflow, from 1e19 on.
    """
    largest = tf.sqrt(tf.add_n([_squares(tensor) for tensor in tensors]))
    if scale is not None:
        # A scale below 1, which `min_scale` allows, makes gradients larger.
        largest = largest / tf.minimum(scale, 1.0)
    return largest < _SAFE


def is_finite(tensor: Any) -> Any:
    """Returns a boolean scalar tensor: is every number of one tensor finite?"""
    if is_sparse(tensor):
        return _is_finite_sparse(tensor)
    if not keras.backend.is_float_dtype(_dtype(tensor)):
        return ops.convert_to_tensor(True)
    if compilation.by_xla() and _rows(tensor) > 1:
        return _is_finite_by_rows(tensor)
    return ops.all(ops.isfinite(tensor))


def is_sparse(tensor: Any) -> bool:
    """Returns whether `tensor` is a `tf.IndexedSlices`, without TensorFlow."""
    return hasattr(tensor, "values") and hasattr(tensor, "dense_shape")


def _is_finite_by_rows(tensor: Any) -> Any:
    # XLA on a CPU reduces booleans one by one, as anything over more than 32
    # numbers: 16 ms for 25 million. TensorFlow's vectorises sums of 32 rows
    # (7 ms), JAX's is fast at products only (5 ms, such sums take 220).
    # A finite number times zero adds zero, any other NaN.
    rows = ops.reshape(tensor, (_rows(tensor), -1))
    if keras.backend.backend() == "tensorflow":
        sums = ops.sum(ops.multiply(rows, 0.0), axis=0)
    else:
        # Of the tensor itself, so that XLA cannot know the result.
        sums = ops.matmul(rows, ops.multiply(rows[0], 0.0))
    return ops.all(ops.equal(sums, 0.0))


def _rows(tensor: Any) -> int:
    """Returns into how many rows to cut a tensor; 1 if into none."""
    shape = tuple(tensor.shape)
    if _dtype(tensor) not in ("float32", "float64") or None in shape:
        return 1
    size = math.prod(shape)
    if size <= _FEW:
        return 1
    if keras.backend.backend() == "tensorflow":
        return math.gcd(size, _MOST_ROWS)
    # Accelerators reduce well, and may round a product's factors to 16 bits.
    return shape[0] if len(shape) > 1 and compilation.for_cpu() else 1


def _is_finite_sparse(slices: Any) -> Any:
    # The optimizer adds up the values of a row. No partial sum exceeds the
    # sum of all magnitudes: while the format holds that, every row is finite.
    total = tf.reduce_sum(tf.abs(tf.cast(slices.values, tf.float32)))

    def by_rows() -> Any:
        rows, position = tf.unique(slices.indices)
        count = tf.shape(rows)[0]
        sums = tf.math.unsorted_segment_sum(slices.values, position, count)
        return tf.reduce_all(tf.math.is_finite(sums))

    fits = total <= tf.cast(slices.dtype.max, tf.float32)
    return tf.cond(fits, lambda: tf.constant(True), by_rows)


def _squares(tensor: Any) -> Any:
    """Returns at least the square of any of the tensor's numbers, float32."""
    if is_sparse(tensor):
        # By Cauchy's and Schwarz's inequality no sum of some rows exceeds the
        # norm of all, multiplied by the root of their number.
        rows = tf.cast(tf.shape(tensor.values)[0], tf.float32)
        return 2.0 * rows * tf.cast(tf.nn.l2_loss(tensor.values), tf.float32)
    if _dtype(tensor) in ("float32", "float64"):
        return 2.0 * tf.cast(tf.nn.l2_loss(tensor), tf.float32)
    # An overwriting value in a narrow format, where squares lose all meaning.
    return tf.where(is_finite(tensor), 0.0, float("inf"))


def _dtype(tensor: Any) -> str:
    return keras.backend.standardize_dtype(tensor.dtype)
