"""Weight gradients in float32, under JAX.

A function of a 16-bit tensor and a float32 weight rounds the weight inside, and
returns its gradient in float32. JAX gets the part that is linear in the weight
as a linear function of a float32 tangent, and finds the transpose itself. So
`jax.grad`, `jax.jvp`, `jax.vmap`, `jax.checkpoint` and any mix of them work.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from tfmix._keras import context

# Computes a result from a tensor and a weight of the same 16-bit dtype.
Function = Callable[[Any, Any], Any]
# Takes a tensor, the tangent of a float32 weight and the result; returns the
# change of the result, in the dtype of the tensor.
Linear = Callable[[Any, Any, Any], Any]

# Each function of this section takes a function of two tensors of one dtype,
# then a 16-bit tensor, a float32 weight and its 16-bit copy, which JAX does not
# need: each product has a copy of its own, since JAX adds the gradients of one
# copy, from the steps of a loop, in 16 bit. It returns the function's result.


def contracted(
    function: Function, inputs: Any, weight: Any, copy: Any, equation: str
) -> Any:
    """Computes a product of matrices.

    In float16 the weight's gradient is one product that sums in float32 and
    returns float32; GPUs run that as fast as with a 16-bit result. JAX casts
    its factors, as `default_matmul_precision` says. In a loop, which also reads
    and writes the sum over all steps in float32, this would move an eighth more
    bytes, so that is computed like a convolution. bfloat16 has float32's range,
    so its result is only rounded once and then widened.
    """
    del equation
    if inputs.dtype != jnp.float16 or context.block.get().in_loop:
        return convolved(function, inputs, weight, copy)

    def in_16_bit(inputs: Any, tangent: Any) -> Any:
        with jax.default_matmul_precision("F16_F16_F32"):
            return function(inputs, tangent)

    def linear(inputs: Any, tangent: Any, result: Any) -> Any:
        del result
        # A CPU has no such product.
        factors = inputs.astype(tangent.dtype), tangent
        change = lax.platform_dependent(
            *factors, cpu=function, default=in_16_bit
        )
        return change.astype(inputs.dtype)

    return _with_gradient(function, linear, inputs, weight, copy)


def convolved(function: Function, inputs: Any, weight: Any, copy: Any) -> Any:
    """Computes a convolution.

    No accelerator returns a filter's gradient of 16-bit factors in float32. In
    float16, the incoming gradient is divided by about the square root of the
    number of products in each sum, and the result is multiplied in float32.
    """
    if inputs.dtype != jnp.float16:
        return function(inputs, weight.astype(inputs.dtype))

    def linear(inputs: Any, tangent: Any, result: Any) -> Any:
        # This is so if each number of the weight is in as many products as each
        # number of both other factors.
        count = math.sqrt(inputs.size * result.size / max(tangent.size, 1))
        power = 2.0 ** math.ceil(math.log2(max(count, 1)) / 2)
        narrow = (tangent * power).astype(inputs.dtype)
        return function(inputs, narrow) * jnp.asarray(1 / power, inputs.dtype)

    return _with_gradient(function, linear, inputs, weight, copy)


def multiplied(function: Function, inputs: Any, weight: Any, copy: Any) -> Any:
    """Computes a product of numbers, or one without rules of its own."""

    def linear(inputs: Any, tangent: Any, result: Any) -> Any:
        del result
        change = function(inputs.astype(tangent.dtype), tangent)
        return change.astype(inputs.dtype)

    return _with_gradient(function, linear, inputs, weight, copy)


def added(
    function: Function, inputs: Any, weight: Any, copy: Any, signs: Any
) -> Any:
    """Computes a sum with a term, such as a bias, that has a sign.

    The weight is repeated in float32, rounded and added. Backwards, the sum of
    the rounded values is then one of float32 numbers.
    """
    del copy, signs
    dtype, shape = (
        inputs.dtype,
        jnp.broadcast_shapes(inputs.shape, weight.shape),
    )

    def repeated(weight: Any) -> Any:
        return jnp.broadcast_to(weight, shape).astype(dtype)

    if not context.block.get().in_loop:
        return function(inputs, repeated(weight))

    # A loop would keep the repeated weight of each step.
    @jax.custom_jvp
    def total(inputs: Any, weight: Any) -> Any:
        return function(inputs, weight.astype(dtype))

    @total.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        # It is linear in both together.
        of_inputs, of_weight = tangents
        return total(*primals), function(of_inputs, repeated(of_weight))

    return total(inputs, weight)


def _with_gradient(
    function: Function, linear: Linear, inputs: Any, weight: Any, copy: Any
) -> Any:
    """Returns a product, which is linear in each of its factors.

    The gradient of the copy is the weight's.
    """

    @jax.custom_jvp
    def result(inputs: Any, weight: Any, copy: Any) -> Any:
        del weight
        return function(inputs, copy)

    @functools.partial(result.defjvp, symbolic_zeros=True)
    def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        inputs, weight, copy = primals
        of_inputs, of_weight, _ = tangents
        # If the rule held `result`, which holds the rule, arrays would be freed
        # late.
        again = functools.partial(_with_gradient, function, linear)
        value = again(inputs, weight, copy)
        changes = []
        if not isinstance(of_inputs, SymbolicZero):
            # JAX transposes this, and forgets `again`: a second derivative by
            # the weight would be a sum in 16 bit.
            is_again = context.is_differentiated(weight)
            changes.append(
                linear(of_inputs, weight, value)
                if is_again
                else again(of_inputs, weight, copy)
            )
        if not isinstance(of_weight, SymbolicZero):
            changes.append(linear(inputs, of_weight, value))
        if not changes:
            return value, jnp.zeros_like(value)
        return value, functools.reduce(jnp.add, changes)

    return result(inputs, weight, copy)
