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

import numpy as np
import tensorflow as tf

from tfmix._keras import (
    context_values,
    global_state,
    kernels,
    tapes,
    tracing,
)
from tfmix.ops.contraction import Contraction

# Computes a result from a tensor and a weight of the same dtype.
Function = Callable[[Any, Any], Any]
# Takes the incoming gradient and the 16-bit weight; returns a gradient.
Gradient = Callable[[Any, Any], Any]
# A graph holds its divided factors under this name, and a gradient the tensor
# and the power of two that it is the product of.
_QUOTIENTS, _PARTS = "_tfmix_quotients", "_tfmix_parts"
_wide = functools.partial(kernels.cast, dtype=tf.float32)


def _on_local(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Passes a function tensors of the graph that is traced now."""

    @functools.wraps(compute)
    def computed(
        function: Function, inputs: Any, weight: Any, *args: Any, **kwargs: Any
    ) -> Any:
        inputs, weight = tapes.local(inputs), tapes.local(weight)
        return compute(function, inputs, weight, *args, **kwargs)

    return computed


@_on_local
def contracted(
    function: Function,
    inputs: Any,
    weight: Any,
    axes: Contraction,
    *,
    in_loop: bool = False,
    copy: Any = None,
) -> Any:
    """Computes a product of matrices.

    Args:
        function: Computes the product.
        inputs: Tensor of a 16-bit dtype.
        weight: Float32 tensor.
        axes: The axes that `function` sums.
        in_loop: Whether it runs in each step of a loop, where XLA would write
            the float32 result and read it again in every step.
        copy: The weight in the dtype of the inputs, if it is known.

    Returns:
        The result of `function` for the inputs and the rounded weight.
    """
    is_eager = tf.executing_eagerly()

    def multiplied(inputs: Any, upstream: Any, narrow: Any = None) -> Any:
        # In eager mode the other way computes the result once more.
        if narrow is not None:
            return _pulled(lambda w: function(inputs, w), narrow, upstream)
        return _product(inputs, upstream, axes.of_weight)

    def of_weight(upstream: Any, narrow: Any) -> Any:
        is_half = inputs.dtype == tf.float16
        if is_half and tracing.by_xla() and not in_loop:
            return _wide_product(inputs, upstream, axes.of_weight)
        sizes = dict(zip(axes.outputs, _shape(upstream), strict=True))
        count = _times([sizes[x] for x in axes.free])
        factors = [inputs, upstream, narrow]
        factors = factors[: 2 if is_eager else 3]
        return _summed(multiplied, factors, count)

    def of_inputs(upstream: Any, narrow: Any) -> Any:
        return _product(upstream, narrow, axes.of_inputs)

    if is_eager and axes.new:
        gradients = of_inputs, of_weight
        return _recorded(function, inputs, weight, copy, gradients)
    return _with_gradient(function, inputs, weight, copy, of_weight)


@_on_local
def convolved(
    function: Function,
    inputs: Any,
    weight: Any,
    positions: Callable,
    *,
    copy: Any,
) -> Any:
    """Computes a convolution.

    Args:
        function: Computes the convolution.
        inputs: Tensor of a 16-bit dtype.
        weight: Float32 tensor.
        positions: Returns the number of summed positions for the shapes of
            the inputs and the result.
        copy: The weight in the dtype of the inputs.

    Returns:
        The result of `function` for the inputs and the rounded weight.
    """

    def multiplied(inputs: Any, upstream: Any, narrow: Any) -> Any:
        return _pulled(lambda w: function(inputs, w), narrow, upstream)

    def of_weight(upstream: Any, narrow: Any) -> Any:
        count = positions(_shape(inputs), _shape(upstream))
        factors = [inputs, upstream, narrow]
        # XLA divides in the kernel that computes the incoming gradient. The
        # inputs were computed long before.
        divided = int(tracing.by_xla())
        return _summed(multiplied, factors, count, divided=divided)

    return _with_gradient(function, inputs, weight, copy, of_weight)


@_on_local
def combined(
    function: Function,
    inputs: Any,
    weight: Any,
    *,
    signs: tuple[int, int] | None,
    in_loop: bool = False,
    copy: Any = None,
) -> Any:
    """Computes a function of each element, such as a sum with a bias.

    Args:
        function: Computes it, from two tensors that broadcast.
        inputs: Tensor of a 16-bit dtype.
        weight: Float32 tensor.
        signs: The signs with which `function` adds inputs and weight; `None`
            if it multiplies them.
        in_loop: Whether it runs in each step of a loop; not used here.
        copy: The weight in the dtype of the inputs, if it is known.

    Returns:
        The result of `function` for the inputs and the rounded weight.
    """
    del in_loop

    def of_weight(upstream: Any, narrow: Any) -> Any:
        if signs is not None and _adds_rows(weight, upstream):
            total = _row_sum(upstream, narrow)
            return -total if signs[1] < 0 else total
        if signs is not None and tf.executing_eagerly():
            # The other way computes the result once more.
            return _of_term(_wide(upstream), weight, signs[1])
        return _of_wide_weight(function, inputs, weight, upstream)

    if tf.executing_eagerly() and signs and _repeats(weight, inputs):
        is_negative = signs[0] < 0

        def of_inputs(upstream: Any, narrow: Any) -> Any:
            return -upstream if is_negative else upstream

        gradients = of_inputs, of_weight
        return _recorded(function, inputs, weight, copy, gradients)
    return _with_gradient(function, inputs, weight, copy, of_weight)


def _repeats(term: Any, other: Any) -> bool:
    """Returns whether a sum with another term has the shape of that one."""
    own, whole = term.shape.as_list(), other.shape.as_list()
    sizes = zip(own[::-1], whole[::-1], strict=False)
    return len(own) <= len(whole) and all(n in (1, m) for n, m in sizes)


def _of_term(upstream: Any, term: Any, sign: int) -> Any:
    """Returns the gradient of a term of a sum that may have repeated it."""
    own, whole = term.shape.as_list(), upstream.shape.as_list()
    repeated = [1] * (len(whole) - len(own)) + own
    sizes = zip(repeated, whole, strict=True)
    axes = [n for n, (size, all_) in enumerate(sizes) if size != all_]
    if axes:
        # An array is an operand at once; a list is converted first.
        upstream = tf.raw_ops.Sum(input=upstream, axis=np.array(axes, "int32"))
    if upstream.shape.as_list() != own:
        upstream = tf.reshape(upstream, own)
    return -upstream if sign < 0 else upstream


def _adds_rows(weight: Any, upstream: Any) -> bool:
    """Returns whether a GPU's kernels sum rows, each of the weight's shape."""
    sizes, known = weight.shape.as_list(), upstream.shape.as_list()
    while sizes[:1] == [1]:
        sizes = sizes[1:]
    is_row = len(known) > len(sizes) > 0 and known[-len(sizes) :] == sizes
    return is_row and tracing.by_gpu_kernels(upstream)


def _row_sum(upstream: Any, narrow: Any) -> Any:
    """Returns the sum of rows as a product with ones.

    `BiasAddGrad` rounds the partial sum of each block of threads to 16 bit.
    """
    rows = tf.reshape(upstream, (-1, _times(_shape(narrow))))
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
    if not (tracing.by_xla() or tracing.for_gpu(factors[0])):
        return multiplied(*map(_wide, factors))
    if factors[0].dtype != tf.float16:
        return _wide(multiplied(*factors))
    power = _root_of_two(count)
    factors = list(factors)
    factors[divided] = _divided(factors[divided], power)
    return enlarged(_wide(multiplied(*factors)), power)


def _divided(tensor: Any, power: Any) -> Any:
    """Divides a float16 tensor, once for all weights that multiply it."""
    # A tape that records has to see the division.
    is_shared = not (tf.executing_eagerly() or tapes.is_recorded())
    if not (is_shared and isinstance(power, float)):
        return tensor * _reciprocal(power, tf.float16)
    graph = tf.compat.v1.get_default_graph()
    known = global_state.note(graph, _QUOTIENTS)
    if known is None:
        known = {}
        setattr(graph, _QUOTIENTS, known)
    # The tensor is kept with its quotient, because the `id` of a freed one is
    # used again.
    if (id(tensor), power) not in known:
        quotient = tensor * _reciprocal(power, tf.float16)
        known[id(tensor), power] = tensor, quotient
    return known[id(tensor), power][1]


def enlarged(tensor: Any, power: Any) -> Any:
    """Multiplies the gradient of a weight by a power of two."""
    result = tensor * power
    if not (tf.executing_eagerly() or tracing.by_xla()):
        # If nothing is added to it, the gates multiply only once.
        global_state.put_note(result, _PARTS, (tensor, power))
    return result


def parts(gradient: Any) -> tuple[Any, Any]:
    """Returns a gradient and `None`, or a tensor and what multiplies it."""
    noted: tuple | None = global_state.note(gradient, _PARTS)
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

    Args:
        function: Computes the result.
        inputs: Tensor of a 16-bit dtype.
        weight: Float32 tensor.
        copy: The weight in the dtype of the inputs, `None` if it is not known.
        of_weight: Returns the gradient of the weight.
    """
    with tapes.unrecorded():
        if copy is None:
            copy = kernels.cast(weight, inputs.dtype)
        narrow = tf.stop_gradient(copy)
    if tf.executing_eagerly() and not tapes.reach(weight):
        return function(inputs, copy)
    result = function(inputs, narrow)

    def of_all(upstream: Any) -> list:
        with context_values.holding(rules=context_values.NO_RULES):
            total = of_weight(upstream, narrow)
            if not tapes.is_recorded():
                return [upstream, None, total]
            # The gradient of this one needs to know the weight.
            again = kernels.cast(weight, copy.dtype)
            pulled = _pulled(lambda x: function(x, again), inputs, upstream)
            return [None, pulled, total]

    sources = [result, inputs, weight]
    (result,) = tapes.replaced([result], sources, [], of_all)
    return result


def _recorded(
    function: Function,
    inputs: Any,
    weight: Any,
    copy: Any,
    gradients: tuple[Gradient, Gradient],
) -> Any:
    """Returns a result for which a tape records both gradients (eager).

    TensorFlow's own gradient would compute that of the 16-bit weight as well.

    Args:
        function: Computes the result.
        inputs: Tensor of a 16-bit dtype.
        weight: Float32 tensor.
        copy: The weight in the dtype of the inputs, `None` if it is not known.
        gradients: Return the gradients of the inputs, and of the weight.
    """
    of_inputs, of_weight = gradients
    if copy is None:
        with tapes.unrecorded():
            copy = kernels.cast(weight, inputs.dtype)
    if not tapes.reach(weight):
        return function(inputs, copy)
    with tapes.unrecorded():
        result = function(inputs, copy)
    # Nobody asks for the gradient of a model's own inputs.
    reaches_inputs = tapes.reach(inputs)

    def of_sources(upstream: Any) -> list:
        with context_values.holding(rules=context_values.NO_RULES):
            total = [of_weight(upstream, copy)]
            if not reaches_inputs:
                return total
            factor = copy
            if tapes.is_recorded():
                # The gradient of this one needs to know the weight.
                factor = kernels.cast(weight, copy.dtype)
            return [*total, of_inputs(upstream, factor)]

    sources = [weight, *([inputs] if reaches_inputs else [])]
    tapes.record_gradient(result, sources, of_sources)
    return result


def _of_wide_weight(
    function: Function, inputs: Any, weight: Any, upstream: Any
) -> Any:
    wide = _wide(inputs)
    return _pulled(lambda w: function(wide, w), weight, _wide(upstream))


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
        narrow = kernels.cast(upstream, a.dtype)
        of_a = _product(narrow, b, axes.of_inputs)
        return [of_a, _product(a, narrow, axes.of_weight)]

    with tapes.unrecorded():
        result = kernels.product_in_float32(a, b, *axes.positions)
        order = axes.batch + axes.free + axes.new
        result = tf.transpose(result, [order.index(x) for x in axes.outputs])
    if tapes.is_recorded():
        # TensorFlow's own gradient takes the float32 result for 16-bit.
        (result,) = tapes.replaced([result], [a, b], [], of_both)
    return result


def _product(a: Any, b: Any, axes: Contraction) -> Any:
    """Multiplies two tensors of one dtype, and returns that."""
    equation = f"{axes.inputs},{axes.weight}->{axes.outputs}"
    return tf.raw_ops.Einsum(inputs=[a, b], equation=equation)


def _times(sizes: Sequence) -> Any:
    product: Any = 1
    for size in sizes:
        product = product * size
    return product


def _shape(tensor: Any) -> list:
    """Returns a tensor's sizes: numbers, or tensors where unknown."""
    known = tensor.shape.as_list()
    if None not in known:
        return list(known)
    sizes = tf.shape(tensor)
    return [sizes[n] if size is None else size for n, size in enumerate(known)]
