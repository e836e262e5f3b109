"""Checks whether tensors hold only finite numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops, tree

from tfmix._keras import compilation, context_values

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
else:
    from jax.experimental import sparse

# One kernel reads this many small, or large tensors together.
_TOGETHER = 64, 8


def all_finite(tensors: Any) -> Any:
    """Returns whether no tensor holds an infinity or a NaN.

    Reads each tensor once and copies nothing to the host. Sparse gradients
    (`tf.IndexedSlices`, JAX's `BCOO`) are checked on their values and on the
    sums of the rows that several values share, never as a dense tensor.

    Args:
        tensors: A tensor, or any nest of lists, tuples and dicts of tensors
            and `None`s, of any shape and dtype. Integers count as finite.

    Returns:
        A boolean scalar tensor; true for an empty nest.

    Examples:
        >>> bool(all_finite({"a": [1.0, 2.0], "b": None}))
        True
        >>> bool(all_finite([1.0, float("inf")]))
        False
    """
    leaves = [
        leaf
        if is_sparse(leaf) or is_sparse_of_jax(leaf)
        else ops.convert_to_tensor(leaf)
        for leaf in tree.flatten(tensors)
        if leaf is not None
    ]
    if not leaves:
        return ops.convert_to_tensor(True)
    return ops.logical_not(ops.any(not_finite(leaves)))


def not_finite(tensors: Sequence) -> Any:
    """Returns a boolean vector, true for each tensor that is not finite.

    Under XLA, one kernel reads several tensors of one shape, so a model with
    hundreds of variables needs a few.
    """
    if not tensors:
        # The model is frozen, or has no weights.
        return ops.zeros((0,), "bool")
    # The rules of a model's step only cost time here.
    with context_values.holding(rules=context_values.NO_RULES):
        return _not_finite(tensors)


def _not_finite(tensors: Sequence) -> Any:
    tensors = [summed(t) if is_sparse_of_jax(t) else t for t in tensors]
    if not compilation.by_xla():
        all_fine = [tensor is None or is_finite(tensor) for tensor in tensors]
        return ops.logical_not(ops.stack(all_fine))
    return compilation.by_shape(tensors, _not_finite_alike, _is_apart)


def _not_finite_alike(tensors: list) -> Any:
    """Returns flags of tensors of one shape, or of one that is apart."""
    if not _is_apart(tensors[0]):
        return _not_finite_of_a_shape(*tensors)
    fine = tensors[0] is None or is_finite(tensors[0])
    return ops.reshape(ops.logical_not(fine), (1,))


def is_finite(tensor: Any) -> Any:
    """Returns a boolean scalar tensor: whether all numbers are finite."""
    if is_sparse(tensor):
        return _is_finite_sparse(tensor)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if dtype.startswith("complex"):
        parts = ops.real(tensor), ops.imag(tensor)
        return ops.logical_and(*map(is_finite, parts))
    if not is_float(tensor):
        return ops.convert_to_tensor(True)
    return ops.all(ops.isfinite(tensor))


def is_sparse(tensor: Any) -> bool:
    """Returns whether `tensor` is a `tf.IndexedSlices`, without TensorFlow."""
    return hasattr(tensor, "values") and hasattr(tensor, "dense_shape")


def is_sparse_of_jax(tensor: Any) -> bool:
    """Returns whether `tensor` is a sparse gradient of Keras's under JAX."""
    on_jax = keras.backend.backend() == "jax"
    return on_jax and isinstance(tensor, sparse.BCOO)


def summed(tensor: Any) -> Any:
    """Returns a dense tensor unchanged, and sums of a sparse one's rows.

    Zeros follow the sums, so that there are as many rows as values.
    """
    if is_sparse_of_jax(tensor):
        return tensor.sum_duplicates(nse=tensor.nse).data
    if not is_sparse(tensor):
        return tensor
    # XLA compiles `tf.unique` to a loop with an iteration for each value.
    order = tf.argsort(tensor.indices)
    rows, count = tf.gather(tensor.indices, order), tf.size(order)
    is_next = tf.cast(rows[1:] != rows[:-1], tf.int32)
    position = tf.cumsum(tf.pad(is_next, [[1, 0]]))[:count]
    values = tf.gather(tensor.values, order)
    return tf.math.unsorted_segment_sum(values, position, count)


def _is_apart(tensor: Any) -> bool:
    """Returns whether no kernel can read a tensor together with others."""
    if tensor is None or is_sparse(tensor) or None in tensor.shape:
        return True
    return not is_float(tensor)


def _counted_together(*tensors: Any) -> Any:
    bad = [ops.cast(compilation.not_finite(x), "int32") for x in tensors]
    return ops.not_equal(compilation.sums(bad, _TOGETHER), 0)


def _by_flags(*tensors: Any) -> Any:
    # Devices exchange a boolean for each. For a CPU, XLA compiles it sooner.
    bad = map(compilation.not_finite, tensors)
    return ops.stack([*map(compilation.any_true, bad)])


VARIANTS: dict[str, Callable] = {
    "single": _counted_together,
    "default": _by_flags,
}
_not_finite_of_a_shape = compilation.by_target(**VARIANTS)


def _is_finite_sparse(slices: Any) -> Any:
    # The optimizer sums the values of a row. No partial sum exceeds the sum of
    # all magnitudes, so every row is finite if the format holds that sum.
    total = tf.reduce_sum(tf.cast(tf.abs(slices.values), tf.float32))

    def by_rows() -> Any:
        return is_finite(summed(slices))

    fits = total <= tf.cast(slices.dtype.real_dtype.max, tf.float32)
    if compilation.by_xla():
        return tf.logical_or(fits, by_rows())
    return tf.cond(fits, lambda: tf.constant(True), by_rows)


def is_float(tensor: Any) -> bool:
    """Returns whether a tensor or variable holds real floats."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.backend.is_float_dtype(dtype)
