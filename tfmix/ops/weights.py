"""Forms the gradients of float32 weights in float32.

Keras casts a float32 variable when a 16-bit layer reads it. A product, a sum or
a lookup with that copy would form the variable's gradient in 16 bit, where the
sum over rows, pixels, time steps or tokens overflows or loses digits. Here each
copy knows its float32 source, and Keras's operations return the gradient to
that source in float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfmix._keras import (
    context_values,
    global_state,
    kernels,
    layers,
    tapes,
)
from tfmix._keras import variables as keras_variables
from tfmix.ops import apply, contraction, exact_values, tensors
from tfmix.ops.apply import Call

products: Any
if keras.backend.backend() == "tensorflow":
    from tfmix.ops import tensorflow_products

    products = tensorflow_products
else:
    from tfmix.ops import jax_products

    products = jax_products

# A variable carries this: the function that multiplies by it.
_CHOSEN = "_tfmix_chosen_product"

# Takes a 16-bit tensor, the float32 weight and the contraction; returns the
# product in the dtype of the tensor, or `None` if it does not support that.
Multiply = Callable[[Any, Any, contraction.Contraction], Any]
# Takes the ranks of both factors, the weight's index and the call.
Axes = Callable[[tuple[int, int], int, Call], contraction.Contraction | None]


def choose(variable: keras.Variable, multiply: Multiply | None) -> None:
    """Sets the function that computes products with this variable.

    `None` removes it.
    """
    layers.put(variable, _CHOSEN, multiply)


def copied(original: Callable, variable: Any, value: Any, dtype: str) -> Any:
    """Returns the 16-bit copy of a variable for a layer that reads it."""
    # Copies of symbols get no notes, so that ops leave them to Keras.
    if not context_values.active_rules() or global_state.on_shapes_only():
        return original(variable, value)
    # The variable is read once, as the tensor that is then copied.
    weight = keras_variables.read(value)
    copy = kernels.cast(weight, dtype)
    multiply = getattr(variable, _CHOSEN, None)
    return exact_values.weight_copy(weight, copy, multiply)


def loop(original: Callable) -> Callable:
    """Returns the function that runs the time steps of a recurrent layer."""

    @functools.wraps(original)
    def inner_loop(*args: Any, **kwargs: Any) -> Any:
        with context_values.holding(in_loop=True):
            return original(*args, **kwargs)

    return inner_loop


# What multiplies or adds one weight and one input; the rows of `table` name it.


def multiplied(call: Call) -> Any:
    """Multiplies by a weight, element by element."""
    return _combined(call, None)


def summed(first: int, second: int) -> Callable[[Call], Any]:
    """Returns what adds two terms, each with its sign."""

    def term(call: Call) -> Any:
        place = call.weight_at()
        signs = (second, first) if place == 0 else (first, second)
        return _combined(call, signs)

    return term


def _combined(call: Call, signs: tuple[int, int] | None) -> Any:
    place = call.weight_at()
    if place is None or not tapes.may_be_asked():
        return call.plain()
    function, inputs, weight = _factors(call, place)
    return products.combined(
        function,
        inputs,
        weight,
        signs=signs,
        in_loop=context_values.block.get().in_loop,
        copy=call.tensors[place],
    )


def _factors(call: Call, place: int) -> tuple[Callable, Any, Any]:
    """Returns an op as a function of input and weight, and both of these."""
    copy, inputs = call.tensors[place], call.tensors[1 - place]
    function = call.with_factors(inputs, copy)
    return function, inputs, exact_values.weight_of(copy)


def product(axes_of: Axes) -> Callable[[Call], Any]:
    """Returns what multiplies by a weight, and sums some axes."""

    def multiply(call: Call) -> Any:
        place = call.weight_at()
        is_asked = tapes.may_be_asked()
        if place is None:
            # A product of several factors.
            return apply.rounded(call)
        noted = call.copies[place]
        own = noted and noted.multiply
        if own is None and not is_asked:
            return call.plain()
        function, inputs, weight = _factors(call, place)
        axes = axes_of(_ranks(inputs, weight, place), place, call)
        result = own and axes and own(inputs, weight, axes)
        if result is not None:
            return result
        if not is_asked:
            return call.plain()
        if axes is None:
            return _combined(call, None)
        in_loop = context_values.block.get().in_loop
        return products.contracted(
            function,
            inputs,
            weight,
            axes,
            in_loop=in_loop,
            copy=call.tensors[place],
        )

    return multiply


def _ranks(inputs: Any, weight: Any, place: int) -> tuple[int, int]:
    ranks = len(inputs.shape), len(weight.shape)
    return ranks if place else ranks[::-1]


def of_matmul(ranks: tuple[int, int], place: int, call: Call) -> Any:
    """Returns the axes of `matmul`; `None` if it repeats stacks of matrices."""
    if min(ranks) > 2:
        first, second = (tuple(x.shape) for x in call.tensors)
        if first[:-2] != second[:-2]:
            return None
    return contraction.of_matmul(ranks, place)


def of_dot(ranks: tuple[int, int], place: int, call: Call) -> Any:
    """Returns the axes of `dot`."""
    del call
    return contraction.of_dot(ranks, place)


def of_tensordot(ranks: tuple[int, int], place: int, call: Call) -> Any:
    """Returns the axes of `tensordot`."""
    axes = call.kwargs.get("axes", call.args[2] if len(call.args) > 2 else 2)
    return contraction.of_tensordot(ranks, axes, place)


def of_einsum(ranks: tuple[int, int], place: int, call: Call) -> Any:
    """Returns the axes of an `einsum`."""
    return contraction.of_einsum(call.args[0], ranks, place)


def convolved(call: Call) -> Any:
    """Convolves with a filter."""
    place = call.weight_at()
    if place != 1:
        return _combined(call, None)
    if not tapes.may_be_asked():
        return call.plain()
    function, inputs, weight = _factors(call, place)
    given = call.op.by_name(call.args, call.kwargs)
    data_format = given["data_format"] or keras.config.image_data_format()
    channels = -1 if data_format.lower() == "channels_last" else 1
    is_transposed = "output_padding" in given

    def positions(inputs: Any, outputs: Any) -> Any:
        # A filter is multiplied once for each of these positions.
        shape = list(inputs if is_transposed else outputs)
        shape.pop(channels)
        return math.prod(shape)

    copy = call.tensors[place]
    return products.convolved(function, inputs, weight, positions, copy=copy)


# These compute a few ops in a way of their own.


def separable_conv(call: Call) -> Any:
    """Computes a separable convolution with weights as two convolutions."""
    call.look()
    if not call.weights:
        return apply.decide(call)
    given = call.op.by_name(call.args, call.kwargs)
    pointwise = given.pop("pointwise_kernel")
    kernel = given.pop("depthwise_kernel")
    inner = keras.ops.depthwise_conv(kernel=kernel, **given)
    return keras.ops.conv(inner, pointwise, data_format=given["data_format"])


def take(call: Call) -> Any:
    """Takes rows of a weight; TensorFlow reads only those."""
    table = call.args[0]
    is_variable = isinstance(table, keras.Variable)
    dtype = keras_variables.narrow_dtype(table) if is_variable else None
    if dtype is not None:
        if global_state.on_shapes_only():
            return call.as_it_came()
        with keras_variables.autocast(None):
            rows = call.as_it_came()
    else:
        weight = exact_values.weight_of(table)
        if weight is None or not tensors.is_16_bit(table):
            call.is_ruled = call.is_ruled or _takes_often(call)
            return apply.apply(call)
        dtype = tensors.float_dtype(table)
        rows = call.op.run((weight, *call.args[1:]), call.kwargs)
    # A note would keep all rows in float32.
    narrowed = tensors.narrow(rows, dtype)
    if context_values.block.get().in_map:
        # Each row of the map may take the same ones.
        exact_values.weight_copy(rows, narrowed)
    return narrowed


def _takes_often(call: Call) -> bool:
    """Returns whether the gradient of a row is a sum of many."""
    given = call.op.by_name(call.args, call.kwargs)
    sizes, axis = given["x"].shape, given["axis"]
    rows = sizes if axis is None else sizes[axis : axis + 1 or None]
    indices = np.shape(given["indices"])
    return apply.is_often(apply.size(rows), apply.size(indices))


apply.WITH_WEIGHT |= {
    "add": summed(1, 1),
    "subtract": summed(1, -1),
    "multiply": multiplied,
    "matmul": product(of_matmul),
    "dot": product(of_dot),
    "inner": multiplied,
    "tensordot": product(of_tensordot),
    "einsum": product(of_einsum),
    **dict.fromkeys(("conv", "depthwise_conv", "conv_transpose"), convolved),
}
