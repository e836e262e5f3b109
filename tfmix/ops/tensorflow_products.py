"""Weight gradients in float32, under TensorFlow.

A function of a 16-bit tensor and a float32 weight rounds the weight inside, and
returns its gradient in float32. Accelerators multiply 16-bit factors on Tensor
Cores, sum in float32 and round the sum once. In bfloat16, which has float32's
range, that sum is the gradient. In float16 one factor is first divided by a
power of two, so that the sum does not overflow; the result is multiplied by it
in float32. There are two exceptions:

* XLA returns the float32 sum of a plain product of matrices directly.
* A CPU's kernels may sum in 16 bit, so there the factors are widened.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmix._keras import context, kernels, tapes
from tfmix.ops import tensors
from tfmix.ops.contraction import Contraction

# Computes a result from a tensor and a weight of the same dtype.
Function = Callable[[Any, Any], Any]
# Takes the tensor, the incoming gradient and the 16-bit weight; returns the
# gradient of the float32 weight.
Gradient = Callable[[Any, Any, Any], Any]
# A gradient holds the tensor and the power of two that it is the product of.
_PARTS = "_tfmix_parts"
_wide = functools.partial(tensors.cast, dtype=tf.float32)

# Each function of this section takes a function of two tensors of one dtype,
# then a 16-bit tensor, a float32 weight and its 16-bit copy. It returns the
# function's result for the tensor and the copy.


def contracted(
    function: Function, inputs: Any, weight: Any, copy: Any, axes: Contraction
) -> Any:
    """Computes a product of matrices, which sums `axes`."""
    in_loop = context.block.get().in_loop

    def of_weight(inputs: Any, upstream: Any, _: Any) -> Any:
        is_half = inputs.dtype == tf.float16
        # In a loop, XLA would write the float32 result and read it again in
        # every step.
        if is_half and context.by_xla() and not in_loop:
            return _wide_product(inputs, upstream, axes.of_weight)
        sizes = dict(zip(axes.outputs, _shape(upstream), strict=True))
        count = math.prod(sizes[x] for x in axes.free)
        multiply = functools.partial(_product, axes=axes.of_weight)
        return _summed(multiply, [inputs, upstream], count)

    return _with_gradient(function, inputs, weight, copy, of_weight)


def convolved(
    function: Function, inputs: Any, weight: Any, copy: Any, positions: Callable
) -> Any:
    """Computes a convolution.

    `positions` returns how many positions are summed, for the shapes of the
    inputs and the result.
    """

    def multiplied(inputs: Any, upstream: Any, narrow: Any) -> Any:
        return _pulled(lambda w: function(inputs, w), narrow, upstream)

    def of_weight(inputs: Any, upstream: Any, narrow: Any) -> Any:
        count = positions(_shape(inputs), _shape(upstream))
        factors = [inputs, upstream, narrow]
        # XLA divides in the kernel that computes the incoming gradient. The
        # inputs were computed long before.
        divided = int(context.by_xla())
        return _summed(multiplied, factors, count, divided=divided)

    return _with_gradient(function, inputs, weight, copy, of_weight)


def multiplied(function: Function, inputs: Any, weight: Any, copy: Any) -> Any:
    """Multiplies element by element."""

    def of_weight(inputs: Any, upstream: Any, _: Any) -> Any:
        return _of_term(tf.multiply(_wide(inputs), _wide(upstream)), weight)

    return _with_gradient(function, inputs, weight, copy, of_weight)


def added(
    function: Function, inputs: Any, weight: Any, copy: Any, sign: int
) -> Any:
    """Computes a sum with a term, such as a bias, that has a sign."""

    def of_weight(_: Any, upstream: Any, narrow: Any) -> Any:
        if _adds_rows(weight, upstream):
            total = _row_sum(upstream, narrow)
        else:
            total = _of_term(_wide(upstream), weight)
        return -total if sign < 0 else total

    return _with_gradient(function, inputs, weight, copy, of_weight)


def _of_term(upstream: Any, term: Any) -> Any:
    """Returns the gradient of a term of a sum that may have repeated it."""
    axes: Any
    if term.shape.is_fully_defined():
        more = upstream.shape.rank - term.shape.rank
        repeated = [more + n for n, size in enumerate(term.shape) if size == 1]
        axes = [*range(more), *repeated]
    else:
        axes, _ = tf.raw_ops.BroadcastGradientArgs(
            s0=tf.shape(term), s1=tf.shape(upstream)
        )
    return tf.reshape(tf.reduce_sum(upstream, axes), _shape(term))


def _adds_rows(weight: Any, upstream: Any) -> bool:
    """Returns whether a GPU's kernels sum rows, each of the weight's shape."""
    sizes, known = weight.shape.as_list(), upstream.shape.as_list()
    while sizes[:1] == [1]:
        sizes = sizes[1:]
    is_row = len(known) > len(sizes) > 0 and known[-len(sizes) :] == sizes
    return is_row and context.by_gpu_kernels(upstream)


def _row_sum(upstream: Any, narrow: Any) -> Any:
    """Returns the sum of rows as a product with ones.

    `BiasAddGrad` rounds the partial sum of each block of threads to 16 bit.
    """
    rows = tf.reshape(upstream, (-1, math.prod(_shape(narrow))))
    count = _shape(rows)[0]
    is_half = upstream.dtype == tf.float16
    power = _root_of_two(count) if is_half else 1.0
    parts = tf.fill((1, count), _reciprocal(power, upstream.dtype))
    total = tf.reshape(tf.matmul(parts, rows), _shape(narrow))
    return enlarged(_wide(total), power) if is_half else _wide(total)


def _summed(
    multiplied: Callable[..., Any],
    factors: Sequence,
    count: Any,
    *,
    divided: int = 0,
) -> Any:
    """Returns a weight's gradient in float32, from 16-bit factors.

    Args:
        multiplied: Computes the gradient in the factors' dtype.
        factors: Its arguments, tensors of one 16-bit dtype.
        count: The number of products in each sum.
        divided: The factor that float16 divides. By default the inputs: they
            are of order one, because no scaling helps the forward pass, and
            lose fewer digits than the incoming gradient.
    """
    if not (context.by_xla() or context.for_gpu(factors[0])):
        return multiplied(*map(_wide, factors))
    if factors[0].dtype != tf.float16:
        return _wide(multiplied(*factors))
    power = _root_of_two(count)
    factors = list(factors)
    factors[divided] *= _reciprocal(power, tf.float16)
    return enlarged(_wide(multiplied(*factors)), power)


def enlarged(tensor: Any, power: Any) -> Any:
    """Multiplies the gradient of a weight by a power of two."""
    result = tensor * power
    if not (tf.executing_eagerly() or context.by_xla()):
        # If nothing is added to it, the gates multiply only once.
        tensors.put_note(result, _PARTS, (tensor, power))
    return result


def parts(gradient: Any) -> tuple[Any, Any]:
    """Returns a gradient and `None`, or a tensor and what multiplies it."""
    noted: tuple | None = tensors.note(gradient, _PARTS)
    return (gradient, None) if noted is None else noted


def _root_of_two(count: Any) -> Any:
    """Returns a power of two of about the square root of a count."""
    if isinstance(count, int):
        return 2.0 ** math.ceil(math.log(max(count, 1), 4))
    halves = tf.math.log(tf.cast(count, tf.float32)) / math.log(4.0)
    return 2.0 ** tf.math.ceil(tf.maximum(halves, 0.0))


def _reciprocal(power: Any, dtype: Any) -> Any:
    # A number needs no operation that casts it.
    make = tf.constant if isinstance(power, float) else tf.cast
    return make(1.0 / power, dtype)


def _with_gradient(
    function: Function, inputs: Any, weight: Any, copy: Any, of_weight: Gradient
) -> Any:
    """Returns a result with TensorFlow's own gradient, but for the weight.

    Who walks through a graph or replaces gradients meets the operations of the
    forward pass.
    """
    if tf.executing_eagerly() and not tapes.reach(weight):
        return function(inputs, copy)
    # The gradient of a branch can only use what the branch has captured.
    inputs, weight = tapes.local(inputs), tapes.local(weight)
    with tapes.unrecorded():
        narrow = tf.stop_gradient(copy)
    result = function(inputs, narrow)

    def of_all(upstream: Any) -> list:
        total = of_weight(inputs, upstream, narrow)
        if not tapes.is_recorded():
            return [upstream, None, total]
        # The gradient of this one needs to know the weight.
        again = tensors.cast(weight, copy.dtype)
        pulled = _pulled(lambda x: function(x, again), inputs, upstream)
        return [None, pulled, total]

    sources = [result, inputs, weight]
    (result,) = tapes.replaced([result], sources, [], of_all)
    return result


def _pulled(function: Callable[[Any], Any], at: Any, upstream: Any) -> Any:
    """Returns the gradient of an affine function, which is alike everywhere.

    The function's result is dead code in a graph.
    """
    # The gradient of a loop has a graph of its own, in which a tape does not
    # know what the loop has computed. The loop keeps no values for a constant.
    is_known = at.shape.is_fully_defined() and not tf.executing_eagerly()
    at = tf.zeros(at.shape, at.dtype) if is_known else tf.identity(at)
    with tf.GradientTape() as tape:
        tape.watch(at)
        result = function(at)
    return tape.gradient(
        result,
        at,
        upstream,
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )


def _wide_product(a: Any, b: Any, axes: Contraction) -> Any:
    """Multiplies 16-bit factors; the result is float32 (XLA)."""

    def of_both(upstream: Any) -> list:
        narrow = tensors.cast(upstream, a.dtype)
        of_a = _product(narrow, b, axes.of_inputs)
        return [of_a, _product(a, narrow, axes.of_weight)]

    with tapes.unrecorded():
        result = kernels.product_in_float32(a, b, *axes.positions)
        order = axes.order
        result = tf.transpose(result, [order.index(x) for x in axes.outputs])
    if tapes.is_recorded():
        # TensorFlow's own gradient takes the float32 result for 16-bit.
        (result,) = tapes.replaced([result], [a, b], [], of_both)
    return result


def _product(a: Any, b: Any, axes: Contraction) -> Any:
    """Multiplies two tensors of one dtype, and returns that."""
    sides = axes.inputs, axes.weight, axes.outputs
    if axes.is_product and all(len(side) == 2 for side in sides):
        # In eager mode an `Einsum` takes three times as long.
        if axes.outputs != axes.order:
            a, b, axes = b, a, Contraction(*sides[1::-1], axes.outputs)
        return tf.raw_ops.MatMul(
            a=a,
            b=b,
            transpose_a=axes.inputs[0] == axes.summed,
            transpose_b=axes.weight[1] == axes.summed,
        )
    equation = f"{axes.inputs},{axes.weight}->{axes.outputs}"
    return tf.raw_ops.Einsum(inputs=[a, b], equation=equation)


def _shape(tensor: Any) -> list:
    """Returns a tensor's sizes: numbers, or tensors where unknown."""
    known = tensor.shape.as_list()
    if None not in known:
        return list(known)
    sizes = tf.shape(tensor)
    return [sizes[n] if size is None else size for n, size in enumerate(known)]
