"""Computes what XLA compiles well only if it is written like this."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfmix._keras import context

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    # Operators of tensors would pass the rules of the caller.
    _is_finite, _not, _cast = tf.math.is_finite, tf.logical_not, tf.cast
    _concatenate, _greater = functools.partial(tf.concat, axis=0), tf.greater
else:
    import jax
    import jax.extend.core
    from jax.interpreters import ad, batching, mlir

    # `jax.numpy` would trace a function for each of hundreds of gradients.
    _is_finite, _not = jax.lax.is_finite, jax.lax.bitwise_not
    _cast = jax.lax.convert_element_type
    _concatenate, _greater = jax.numpy.concatenate, jax.numpy.greater

# A tensor with more numbers is large.
_LARGE = 2**18
# One kernel reads this many small, or large tensors together.
_TOGETHER = 64, 8


def kept_apart(tensor: Any) -> Any:
    """Returns the tensor behind a barrier to compiler optimizations."""
    if keras.backend.backend() == "jax":
        return jax.lax.optimization_barrier(tensor)
    if not context.by_xla():
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=())
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return gen_xla_ops.xla_optimization_barrier([tensor])[0]


def bitcast(tensor: Any, dtype: str) -> Any:
    """Reads the same bits as another dtype of the same size."""
    if keras.backend.backend() == "tensorflow":
        tensor = tf.convert_to_tensor(tensor)
        return tf.raw_ops.Bitcast(input=tensor, type=tf.as_dtype(dtype))
    return jax.lax.bitcast_convert_type(jax.numpy.asarray(tensor), dtype)


def product_in_float32(a: Any, b: Any) -> Any:
    """Multiplies the columns of 16-bit matrices (TensorFlow, XLA).

    Returns:
        The product of `a`, transposed, and `b` in float32.
    """
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    # These are `xla.DotDimensionNumbers`: the first axis of both is summed.
    return gen_xla_ops.xla_dot_v2(
        a,
        b,
        dimension_numbers=b"\x0a\x01\x00\x12\x01\x00",
        precision_config=b"",
        preferred_element_type=tf.float32,
    )


def _sums(tensors: Sequence) -> Any:
    # XLA reads all of them in one kernel. Separate sums take two kernels each.
    axes = range(len(tensors[0].shape))
    if keras.backend.backend() == "jax":
        zeros = [jax.numpy.zeros((), tensor.dtype) for tensor in tensors]
        totals = jax.lax.reduce(
            tuple(tensors),
            tuple(zeros),
            lambda left, right: tuple(map(jax.lax.add, left, right)),
            tuple(axes),
        )
        return jax.numpy.stack(totals)
    if not context.by_xla():
        return tf.stack([tf.reduce_sum(tensor) for tensor in tensors])
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    def added(*both: Any) -> tuple:
        half = len(both) // 2
        pairs = zip(both[:half], both[half:], strict=True)
        return tuple(left + right for left, right in pairs)

    scalars = [tf.TensorSpec((), tensor.dtype) for tensor in tensors]
    reducer = tf.function(added, autograph=False)
    totals = gen_xla_ops.xla_variadic_reduce_v2(
        list(tensors),
        [tf.zeros((), tensor.dtype) for tensor in tensors],
        list(axes),
        reducer.get_concrete_function(*scalars, *scalars),
    )
    return tf.stack(totals)


def by_target(
    single: Callable,
    default: Callable,
    *,
    shaped: Callable,
) -> Callable[..., Any]:
    """Returns a function of tensors that XLA compiles for its target.

    The host's own devices do not matter. TensorFlow's tensors are not shared.

    Args:
        single: Computes it on a single accelerator.
        default: Computes the same on a CPU, and where devices share the
            tensors.
        shaped: Returns the shape and the dtype of the result, so that only the
            function that is chosen is traced.
    """
    if keras.backend.backend() == "tensorflow":
        return single
    primitive = jax.extend.core.Primitive("tfmix_by_target")

    def lower(context: Any, *values: Any) -> Any:
        around = context.module_context
        is_alone = getattr(around.axis_context, "num_devices", None) == 1
        on_cpu = "cpu" in around.platforms
        chosen = single if is_alone and not on_cpu else default
        lowering = mlir.lower_fun(chosen, multiple_results=False)
        return lowering(context, *values)

    def batched(values: Sequence, axes: Sequence) -> tuple[Any, int]:
        return jax.vmap(default, axes)(*values), 0

    def abstract(*values: Any) -> Any:
        like = shaped(*values)
        return jax.core.ShapedArray(like.shape, like.dtype)

    def without_gradient(primals: Sequence, tangents: Sequence) -> tuple:
        del tangents
        value = primitive.bind(*primals)
        is_float = jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)
        dtype = value.dtype if is_float else jax.dtypes.float0
        return value, ad.Zero(jax.core.ShapedArray(value.shape, dtype))

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(jax.jit(default))
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = without_gradient
    return primitive.bind


def _counted_together(*tensors: Any) -> Any:
    bad = [_cast(_not(_is_finite(x)), "int32") for x in tensors]
    step = _TOGETHER[math.prod(tensors[0].shape) > _LARGE]
    starts = range(0, len(bad), step)
    parts = [_sums(bad[start : start + step]) for start in starts]
    return _greater(_concatenate(parts), 0)


def _by_flags(*tensors: Any) -> Any:
    # Devices exchange a boolean for each.
    return _not(jax.numpy.stack([_all_true(_is_finite(x)) for x in tensors]))


def _flags_of(*tensors: Any) -> Any:
    return jax.ShapeDtypeStruct((len(tensors),), "bool")


def _all_true(flags: Any) -> Any:
    """Returns whether all of a boolean array are true, as a scalar."""
    return jax.lax.reduce_and(flags, tuple(range(flags.ndim)))


VARIANTS: dict[str, Callable] = {
    "single": _counted_together,
    "default": _by_flags,
}
# Returns which of several float tensors of one shape are not finite, as a
# boolean vector (XLA).
not_finite_alike = by_target(**VARIANTS, shaped=_flags_of)
