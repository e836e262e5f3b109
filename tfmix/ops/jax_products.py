"""Weight gradients in float32, under JAX.

A function of a 16-bit tensor and a float32 weight rounds the weight inside, and
returns its gradient in float32. JAX gets the part that is linear in the weight
as a linear function of a float32 tangent, and finds the transpose itself. So
`jax.grad`, `jax.jvp`, `jax.vmap`, `jax.checkpoint` and any mix of them work.
"""

import functools
import math
import string
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.extend.core
from jax import lax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from tfmix._keras import context
from tfmix.ops.contraction import Contraction

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
    function: Function, inputs: Any, weight: Any, copy: Any, axes: Contraction
) -> Any:
    """Computes a product of matrices, which sums `axes`.

    In float16 the weight's gradient is one product that sums in float32 and
    returns float32; GPUs run that as fast as with a 16-bit result. In a loop,
    which also reads and writes the sum over all steps in float32, this would
    move an eighth more bytes. There, the inputs are divided by about the square
    root of the number of rows, and the 16-bit result is multiplied in float32.
    bfloat16 has float32's range, so its result is only rounded once and then
    widened.
    """
    del copy
    if inputs.dtype != jnp.float16:
        return function(inputs, weight.astype(inputs.dtype))
    if not context.block.get().in_loop:
        factor, weight = varying_alike((inputs, weight))
        return _multiply(factor, weight, axes, inputs.dtype, inputs.dtype)

    def linear(inputs: Any, tangent: Any, result: Any) -> Any:
        sizes = dict(zip(axes.outputs, result.shape, strict=True))
        power = root_of_two(math.prod(sizes[x] for x in axes.free))
        narrow = (tangent * power).astype(inputs.dtype)
        return function(inputs * jnp.asarray(1 / power, inputs.dtype), narrow)

    return _with_gradient(function, linear, inputs, weight)


def convolved(
    function: Function, inputs: Any, weight: Any, copy: Any, positions: Callable
) -> Any:
    """Computes a convolution.

    No accelerator returns a filter's gradient of 16-bit factors in float32. In
    float16, the incoming gradient is divided by about the square root of the
    number of summed positions, and the result is multiplied in float32.
    `positions` returns that number for the shapes of the inputs and the result.
    """
    del copy
    if inputs.dtype != jnp.float16:
        return function(inputs, weight.astype(inputs.dtype))

    def linear(inputs: Any, tangent: Any, result: Any) -> Any:
        power = root_of_two(positions(inputs.shape, result.shape))
        narrow = (tangent * power).astype(inputs.dtype)
        return function(inputs, narrow) * jnp.asarray(1 / power, inputs.dtype)

    return _with_gradient(function, linear, inputs, weight)


def root_of_two(count: int) -> float:
    """Returns a power of two of about the square root of a count."""
    return 2.0 ** math.ceil(math.log2(max(count, 1)) / 2)


def multiplied(function: Function, inputs: Any, weight: Any, copy: Any) -> Any:
    """Computes a product of numbers, or one without rules of its own."""
    del copy

    def linear(inputs: Any, tangent: Any, result: Any) -> Any:
        del result
        change = function(inputs.astype(tangent.dtype), tangent)
        return change.astype(inputs.dtype)

    return _with_gradient(function, linear, inputs, weight)


def added(
    function: Function, inputs: Any, weight: Any, copy: Any, sign: int
) -> Any:
    """Computes a sum with a term, such as a bias, that has a sign.

    The weight is repeated in float32, rounded and added. Backwards, the sum of
    the rounded values is then one of float32 numbers.
    """
    del copy, sign
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
    function: Function, linear: Linear, inputs: Any, weight: Any
) -> Any:
    """Returns a product, which is linear in each of its factors."""

    @jax.custom_jvp
    def result(inputs: Any, weight: Any) -> Any:
        return function(inputs, weight.astype(inputs.dtype))

    @functools.partial(result.defjvp, symbolic_zeros=True)
    def _(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
        inputs, weight = primals
        of_inputs, of_weight = tangents
        # If the rule held `result`, which holds the rule, arrays would be freed
        # late.
        again = functools.partial(_with_gradient, function, linear)
        value = again(inputs, weight)
        changes = []
        if not isinstance(of_inputs, SymbolicZero):
            changes.append(again(of_inputs, weight))
        if not isinstance(of_weight, SymbolicZero):
            changes.append(linear(inputs, of_weight, value))
        if not changes:
            return value, jnp.zeros_like(value)
        return value, functools.reduce(jnp.add, changes)

    return result(inputs, weight)


def varying_alike(values: Iterable) -> tuple:
    """Makes all arrays vary over every `shard_map` axis that one varies over.

    JAX then sums the gradients of the others. In a function with a custom
    gradient it leaves that to the author.
    """
    by_value = [(value, _varying_axes(value)) for value in values]
    every = frozenset().union(*(axes for _, axes in by_value))
    return tuple(
        value
        if axes == every
        else lax.pcast(value, tuple(every - axes), to="varying")
        for value, axes in by_value
    )


def _varying_axes(value: Any) -> frozenset[str]:
    kind = jax.typeof(value)
    # JAX before 0.10 calls it `vma`.
    axes = getattr(kind, "manual_axis_type", None)
    varying: frozenset[str] = (
        getattr(kind, "vma", frozenset()) if axes is None else axes.varying
    )
    return varying


# A product of two 16-bit factors that returns a chosen dtype, like
# `dot_general`. The difference is in the gradients: each is such a product,
# too, in the dtype of its factor. Those of `dot_general` get the dtype of the
# result and are cast.
_product = jax.extend.core.Primitive("tfmix_product")
_HOW = "axes", "narrow", "dtype"


def _multiply(
    a: Any, b: Any, axes: Contraction, narrow: Any, dtype: Any
) -> Any:
    """Multiplies factors that are rounded to `narrow`; returns `dtype`.

    It is linear in each factor, which may be float32.
    """
    order = axes.order
    alike = Contraction(axes.inputs, axes.weight, order)
    result = _product.bind(a, b, axes=alike, narrow=narrow, dtype=dtype)
    return lax.transpose(result, tuple(map(order.index, axes.outputs)))


def _computed(
    a: Any, b: Any, *, axes: Contraction, narrow: Any, dtype: Any
) -> Any:
    def product(wide: Any, a: Any, b: Any) -> Any:
        return lax.dot_general(
            a.astype(wide),
            b.astype(wide),
            axes.positions,
            preferred_element_type=dtype,
        )

    # A CPU has no product of bfloat16 that returns float32 in all shapes.
    return lax.platform_dependent(
        a.astype(narrow),
        b.astype(narrow),
        cpu=functools.partial(product, dtype),
        default=functools.partial(product, narrow),
    )


def _abstract(
    a: Any, b: Any, *, axes: Contraction, narrow: Any, dtype: Any
) -> Any:
    result, _ = lax.dot_general_p.abstract_eval(
        a.update(dtype=narrow),
        b.update(dtype=narrow),
        dimension_numbers=axes.positions,
        precision=None,
        preferred_element_type=dtype,
        out_sharding=None,
    )
    return result


def _of_first(
    upstream: Any, a: Any, b: Any, *, axes: Contraction, narrow: Any, **_: Any
) -> Any:
    return _multiply(upstream, b, axes.of_inputs, narrow, a.aval.dtype)


def _of_second(
    upstream: Any, a: Any, b: Any, *, axes: Contraction, narrow: Any, **_: Any
) -> Any:
    return _multiply(a, upstream, axes.of_weight, narrow, b.aval.dtype)


def _batched(
    values: tuple, at: tuple, *, axes: Contraction, narrow: Any, dtype: Any
) -> tuple[Any, int]:
    """Adds an axis, which gets a letter of its own."""
    used = axes.inputs + axes.weight
    letter = next(x for x in string.ascii_letters if x not in used)
    sides = [
        side if place is None else side[:place] + letter + side[place:]
        for side, place in zip((axes.inputs, axes.weight), at, strict=True)
    ]
    more = Contraction(sides[0], sides[1], letter + axes.outputs)
    return _multiply(values[0], values[1], more, narrow, dtype), 0


_product.def_impl(jax.jit(_computed, static_argnames=_HOW))
_product.def_abstract_eval(_abstract)
ad.defbilinear(_product, _of_first, _of_second)
batching.primitive_batchers[_product] = _batched
mlir.register_lowering(
    _product, mlir.lower_fun(_computed, multiple_results=False)
)
