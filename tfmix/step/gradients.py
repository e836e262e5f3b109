"""What happens to a gradient, dense or sparse, before a step takes it."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import kernels, tracing
from tfmix._keras import variables as keras_variables
from tfmix.ops import tensors

if keras.backend.backend() == "jax":
    from jax.experimental import sparse

# Beyond 2^126 a scale's reciprocal is subnormal, which XLA flushes to zero.
_HALFWAY = 2.0**64
# Operations that only explain why a gradient is not finite run for gradients of
# at most this size. XLA fuses them, so it has no limit.
_SMALL = 4096


def in_float32(grads: Sequence, variables: Sequence) -> list:
    """Returns gradients, dense or sparse, in float32.

    A value that overwrites its variable stays unchanged.
    """
    return _of_gradients(widened, grads, variables)


def unscaled(grads: Sequence, variables: Sequence, scale: Any) -> list:
    """Returns gradients in float32, divided by the scale.

    A value that overwrites its variable stays unchanged.
    """
    divided = _quotient(scale)

    def true(gradient: Any) -> Any:
        wide = widened(gradient)
        if not is_sparse(gradient):
            return _on_values(divided, wide)
        # XLA may have to evaluate the scale at compile time
        # (`divides_gradients`), which a barrier would prevent.
        return _on_values(functools.partial(_divided, scale), wide)

    return _of_gradients(true, grads, variables)


def _of_gradients(
    function: Callable[[Any], Any], grads: Sequence, variables: Sequence
) -> list:
    kept = [*map(keras_variables.is_overwritten, variables)]
    return [
        gradient if gradient is None or is_kept else function(gradient)
        for gradient, is_kept in zip(grads, kept, strict=True)
    ]


def narrow_if_dense(grads: Sequence, true: Sequence) -> list:
    """Returns what to check: dense gradients as given, sparse ones in float32.

    Fewer bytes are read so. The rows of sparse gradients are summed, in
    float32.
    """
    return [
        wide if is_sparse(gradient) else gradient
        for gradient, wide in zip(grads, true, strict=True)
    ]


def _quotient(scale: Any) -> Callable[[Any], Any]:
    """Returns a function that divides a tensor by a scale."""
    # The reciprocal of a constant beyond 2^126 would be folded to zero.
    apart = kernels.kept_apart(scale)
    if tracing.by_xla():
        return _by_reciprocal(apart)
    return functools.partial(_divided, apart)


def _divided(scale: Any, tensor: Any) -> Any:
    return ops.divide(tensor, ops.cast(scale, tensor.dtype))


def _by_reciprocal(scale: Any) -> Callable[[Any], Any]:
    # XLA repeats a product in every kernel that reads it, where a division gets
    # a kernel and a tensor of its own. It is exact for powers of two; otherwise
    # the product rounds once more.
    is_huge = ops.greater(scale, _HALFWAY)
    lowered = ops.where(is_huge, scale / _HALFWAY, scale)

    # All gradients share the scalars, because each operation takes time to
    # compile.
    @functools.cache
    def reciprocal(dtype: Any) -> Any:
        return 1.0 / ops.cast(lowered, dtype)

    def multiplied(tensor: Any) -> Any:
        # XLA would join two factors into one.
        tensor = ops.where(is_huge, tensor / _HALFWAY, tensor)
        return tensor * reciprocal(tensor.dtype)

    return multiplied


def without_infinities(tensor: Any) -> Any:
    """Returns a float tensor, dense or sparse, with NaN for infinity."""
    return _on_values(
        lambda values: ops.where(ops.isfinite(values), values, float("nan")),
        tensor,
    )


def _on_values(function: Callable[[Any], Any], tensor: Any) -> Any:
    if is_sparse_of_jax(tensor):
        parts = function(tensor.data), tensor.indices
        return type(tensor)(parts, shape=tensor.shape)
    if not is_sparse(tensor):
        return function(tensor)
    values = function(tensor.values)
    return type(tensor)(values, tensor.indices, tensor.dense_shape)


def widened(gradient: Any) -> Any:
    """Returns a gradient, dense or sparse, in float32 if it was 16-bit."""
    narrow = keras_variables.is_narrow(gradient)
    return _on_values(tensors.to_float32, gradient) if narrow else gradient


def without_values(grads: Sequence, variables: Sequence) -> list:
    """Returns gradients without the values that overwrite their variables."""
    return [
        gradient
        for gradient, variable in zip(grads, variables, strict=True)
        if not keras_variables.is_overwritten(variable)
    ]


def keep_overflow_visible(gradients: Sequence) -> list[bool]:
    """Returns which gradients say why they are not finite.

    `blames_data` reads that from them. A model's gates return NaN for all
    gradients if an incoming gradient was not finite. An overflow inside leaves
    as infinity, or, in the other gradients, as it was computed. TensorFlow's
    own kernels would read each gradient once more for it.

    Args:
        gradients: The gradients of a model's variables, at least one.
    """
    if tracing.by_xla():
        return [True] * len(gradients)
    if tracing.trace() == tracing.EAGER:
        # Each operation takes as long as one of a small model.
        small = [len(x.shape) < 2 for x in gradients]
    else:
        sizes = [x.shape.num_elements() for x in gradients]
        small = [size is None or size <= _SMALL for size in sizes]
    return small if any(small) else [True] * len(gradients)


def is_small(gradient: Any) -> bool:
    """Returns whether a gradient is known to hold few numbers."""
    size = gradient.shape.num_elements()
    return size is not None and size <= _SMALL


def blames_data(gradients: Sequence, both: Callable) -> Any:
    """Returns whether gradients are not finite because the loss was not.

    One number of a gradient that shows the reason is enough.

    Args:
        gradients: Gradients of a model that scales them; `None` where there is
            none.
        both: Function of what the first and the last gradient say.

    Returns:
        Boolean scalar tensor; `False` if there is no gradient.
    """
    numbers = [values(each) for each in gradients if each is not None]
    numbers = [value for value in numbers if 0 not in tuple(value.shape)]
    says_why = keep_overflow_visible(numbers)
    numbers = [*itertools.compress(numbers, says_why)]
    if not numbers:
        return False
    # The first variable gets gradients from everything after it. The last one
    # may belong to the one head whose loss is not finite. Scalars fuse with the
    # update of the rule, so they add no kernel. If the gradient were flattened
    # first, a TPU would copy all of it.
    first, last = (
        ops.isnan(ops.reshape(value[(slice(1),) * len(value.shape)], ()))
        for value in (numbers[0], numbers[-1])
    )
    return both(first, last)


def is_float(tensor: Any) -> bool:
    """Returns whether a tensor or variable holds real floats."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.backend.is_float_dtype(dtype)


def is_sparse(tensor: Any) -> bool:
    """Returns whether `tensor` is a `tf.IndexedSlices`, without TensorFlow."""
    return hasattr(tensor, "values") and hasattr(tensor, "dense_shape")


def is_sparse_of_jax(tensor: Any) -> bool:
    """Returns whether `tensor` is a sparse gradient of Keras's under JAX."""
    on_jax = keras.backend.backend() == "jax"
    return on_jax and isinstance(tensor, sparse.BCOO)


def values(tensor: Any) -> Any:
    """Returns the values of a sparse tensor, and a dense one unchanged."""
    if is_sparse_of_jax(tensor):
        return tensor.data
    return tensor.values if is_sparse(tensor) else tensor
