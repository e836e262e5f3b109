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

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmix._keras import context, kernels, tapes
from tfmix.ops import tensors
from tfmix.policy import op_lists

# Computes a result from a tensor and a weight of the same dtype.
Function = Callable[[Any, Any], Any]
# Takes the tensor, the incoming gradient and the 16-bit weight; returns the
# gradient of the float32 weight.
Gradient = Callable[[Any, Any, Any], Any]
# A gradient holds the tensor and the power of two that it is the product of.
PARTS = "_tfmix_parts"
# An incoming gradient in float32, which both gradients of a `Dense` take.
_WIDE = "_tfmix_wide"


def _wide(tensor: Any) -> Any:
    noted = tensors.note(tensor, _WIDE)
    if noted is None or tapes.is_recorded():
        return tensors.cast(tensor, tf.float32)
    return noted


# Each function of this section takes a function of two tensors of one dtype,
# then a 16-bit tensor, a float32 weight and its 16-bit copy. It returns the
# function's result for the tensor and the copy.


def contracted(
    function: Function, inputs: Any, weight: Any, copy: Any, equation: str
) -> Any:
    """Computes a product of matrices: the einsum `equation`, "" if unknown."""
    if equation != op_lists.ROWS:
        return _product(function, inputs, weight, copy, equation)
    in_loop = context.block.get().in_loop

    def of_weight(inputs: Any, upstream: Any, narrow: Any) -> Any:
        rows = [
            tf.reshape(x, (-1, n)) if x.shape.rank != 2 else x
            for x, n in zip((inputs, upstream), narrow.shape, strict=True)
        ]
        # In a loop, XLA would write the float32 result and read it again in
        # every step.
        if inputs.dtype == tf.float16 and context.by_xla() and not in_loop:
            return _wide_product(*rows)
        return _summed(_of_rows, rows, _shape(rows[0])[0])

    def of_inputs(upstream: Any, narrow: Any) -> Any:
        return tf.matmul(upstream, narrow, transpose_b=True)

    return _with_gradient(function, inputs, weight, copy, of_weight, of_inputs)


def _of_rows(a: Any, b: Any) -> Any:
    # In eager mode `tf.matmul` takes longer.
    return tf.raw_ops.MatMul(a=a, b=b, transpose_a=True)


def convolved(function: Function, inputs: Any, weight: Any, copy: Any) -> Any:
    """Computes a convolution."""
    # XLA divides in the kernel that computes the incoming gradient. The inputs
    # were computed long before.
    divided = int(context.by_xla())
    return _product(function, inputs, weight, copy, divided=divided)


def _product(
    function: Function,
    inputs: Any,
    weight: Any,
    copy: Any,
    equation: str = "",
    divided: int = 0,
) -> Any:
    """Computes a product; float16 divides the factor `divided` (`_summed`)."""
    sides = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation.replace(" ", ""))

    def multiplied(inputs: Any, upstream: Any, narrow: Any) -> Any:
        if sides is None or len({*sides[2]}) < len(sides[2]):
            return _pulled(lambda w: function(inputs, w), narrow, upstream)
        # The gradients of what Keras makes of an einsum move more bytes.
        swapped = f"{sides[1]},{sides[3]}->{sides[2]}"
        return tf.raw_ops.Einsum(inputs=[inputs, upstream], equation=swapped)

    def of_weight(inputs: Any, upstream: Any, narrow: Any) -> Any:
        factors = [inputs, upstream, narrow]
        return _summed(multiplied, factors, _count(*factors), divided=divided)

    return _with_gradient(function, inputs, weight, copy, of_weight)


def _count(inputs: Any, upstream: Any, weight: Any) -> Any:
    """Returns how many products each number of a weight's gradient sums.

    It is this many if each number of the weight is in as many products as each
    number of both other factors.
    """
    return (_size(inputs) * _size(upstream) / _size(weight)) ** 0.5


def _size(tensor: Any) -> Any:
    number = tensor.shape.num_elements()
    if number is None:
        return tf.cast(tf.size(tensor), tf.float32)
    return float(max(number, 1))


def multiplied(function: Function, inputs: Any, weight: Any, copy: Any) -> Any:
    """Multiplies element by element."""

    def of_weight(inputs: Any, upstream: Any, _: Any) -> Any:
        return _of_term(tf.multiply(_wide(inputs), _wide(upstream)), weight)

    return _with_gradient(function, inputs, weight, copy, of_weight)


def added(
    function: Function, inputs: Any, weight: Any, copy: Any, signs: Sequence
) -> Any:
    """Computes a sum with a term, such as a bias; each has a sign."""

    def of_inputs(upstream: Any, _: Any) -> Any:
        if upstream.shape != inputs.shape:
            total = _of_term(_wide(upstream), inputs)
            upstream = tensors.cast(total, inputs.dtype)
        return upstream if signs[0] > 0 else -upstream

    def of_weight(_: Any, upstream: Any, narrow: Any) -> Any:
        if _adds_rows(weight, upstream):
            total = _row_sum(upstream, narrow)
        else:
            wide = _wide(upstream)
            if tf.executing_eagerly():
                tensors.put_note(upstream, _WIDE, wide)
            total = _of_term(wide, weight)
        return total if signs[1] > 0 else -total

    return _with_gradient(function, inputs, weight, copy, of_weight, of_inputs)


def _of_term(upstream: Any, term: Any) -> Any:
    """Returns the gradient of a term of a sum that may have repeated it."""
    shape, axes = term.shape, None
    if shape.is_fully_defined():
        more = upstream.shape.rank - shape.rank
        sizes = enumerate(shape.as_list(), more)
        repeated = [n for n, size in sizes if size == 1]
        # A list would first become a tensor.
        axes = np.array([*range(more), *repeated], "int32")
        if not repeated:
            return tf.raw_ops.Sum(input=upstream, axis=axes)
    else:
        axes, _ = tf.raw_ops.BroadcastGradientArgs(
            s0=tf.shape(term), s1=tf.shape(upstream)
        )
    total = tf.raw_ops.Sum(input=upstream, axis=axes)
    return tf.reshape(total, _shape(term))


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
        tensors.put_note(result, PARTS, (tensor, power))
    return result


def _root_of_two(count: Any) -> Any:
    """Returns a power of two of about the square root of a count."""
    if isinstance(count, int | float):
        return 2.0 ** math.ceil(math.log(max(count, 1), 4))
    halves = tf.math.log(tf.cast(count, tf.float32)) / math.log(4.0)
    return 2.0 ** tf.math.ceil(tf.maximum(halves, 0.0))


def _reciprocal(power: Any, dtype: Any) -> Any:
    # A number needs no operation that casts it.
    make = tf.constant if isinstance(power, float) else tf.cast
    return make(1.0 / power, dtype)


def _with_gradient(
    function: Function,
    inputs: Any,
    weight: Any,
    copy: Any,
    of_weight: Gradient,
    of_inputs: Function | None = None,
) -> Any:
    """Returns a result with TensorFlow's own gradient, but for the weight.

    Who walks through a graph or replaces gradients meets the operations of the
    forward pass. In eager mode each operation more takes as long as one of a
    small model, so where the other gradient is known, too, one record has both.
    """
    if tf.executing_eagerly():
        if not tapes.reach(weight):
            return function(inputs, copy)
        if of_inputs is not None:
            return _recorded(
                function, inputs, weight, copy, of_weight, of_inputs
            )
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

    return tapes.replaced([result], [result, inputs, weight], [], of_all)[0]


def _recorded(
    function: Function,
    inputs: Any,
    weight: Any,
    copy: Any,
    of_weight: Gradient,
    of_inputs: Function,
) -> Any:
    is_asked = tapes.reach(inputs)
    with tapes.unrecorded():
        result = function(inputs, copy)

    def of_both(upstream: Any) -> list:
        narrow = copy
        if tapes.is_recorded():
            # The gradient of this one needs to know the weight.
            narrow = tensors.cast(weight, copy.dtype)
        of_first = of_inputs(upstream, narrow) if is_asked else None
        return [of_first, of_weight(inputs, upstream, narrow)]

    tapes.record_as([result], [inputs, weight], of_both)
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


def _wide_product(a: Any, b: Any) -> Any:
    """Multiplies the columns of 16-bit matrices; returns float32 (XLA)."""

    def of_both(upstream: Any) -> list:
        narrow = tensors.cast(upstream, a.dtype)
        return [tf.matmul(b, narrow, transpose_b=True), tf.matmul(a, narrow)]

    with tapes.unrecorded():
        result = kernels.product_in_float32(a, b)
    if tapes.is_recorded():
        # TensorFlow's own gradient takes the float32 result for 16-bit.
        (result,) = tapes.replaced([result], [a, b], [], of_both)
    return result


def _shape(tensor: Any) -> list:
    """Returns a tensor's sizes: numbers, or tensors where unknown."""
    known = tensor.shape.as_list()
    if None not in known:
        return list(known)
    sizes = tf.shape(tensor)
    return [sizes[n] if size is None else size for n, size in enumerate(known)]
