"""Ops that compute in a way of their own.

A value that a loop carries from step to step is a sum over its steps. So it is
float32, whatever it begins with.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import context, layers
from tfmix._keras import variables as keras_variables
from tfmix.ops import apply, attention, logits, tensors

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# The arguments of each loop: what computes a step, and what it begins with.
_LOOPS = {
    "scan": ("f", "init"),
    "fori_loop": ("body_fun", "init_val"),
    "while_loop": ("body", "loop_vars"),
    "associative_scan": ("f", "elems"),
}


def carry_float32(call: apply.Call) -> Any:
    """Runs a loop, whose carries are float32."""
    is_raw = call.op.original.__module__.startswith("jax")
    if is_raw and context.block.get().in_loop:
        # Keras runs a recurrent layer by it, whose states are 16 bit.
        return call.plain()
    step_name, start_name = _LOOPS[call.op.name]
    given = call.op.by_name(call.args, call.kwargs)
    step, start = given[step_name], _wide(given[start_name])

    def wide_step(*args: Any) -> Any:
        made = step(*args)
        if call.op.name == "scan" and not _ON_TENSORFLOW:
            carry, result = made
            return _wide(carry), result
        # Keras's TensorFlow collects results in arrays of the carry's dtype.
        return _wide(made)

    return call.op.run((), {**given, step_name: wide_step, start_name: start})


def _wide(nest: Any) -> Any:
    return tensors.map_leaves(nest, tensors.to_float32)


def vectorized_map(call: apply.Call) -> Any:
    """Runs a function for each row, by ops that TensorFlow can convert.

    What converts them loses gradients that are not TensorFlow's own.
    """
    with context.holding(in_map=_ON_TENSORFLOW):
        return call.plain()


def in_time_steps(original: Callable) -> Callable:
    """Returns the function that runs the time steps of a recurrent layer."""

    @functools.wraps(original)
    def loop(*args: Any, **kwargs: Any) -> Any:
        with context.holding(in_loop=True):
            return original(*args, **kwargs)

    return loop


def separable_conv(call: apply.Call) -> Any:
    """Computes a separable convolution with weights as two convolutions."""
    call.look()
    if not call.weights:
        return apply.decide(call)
    given = call.op.by_name(call.args, call.kwargs)
    pointwise = given.pop("pointwise_kernel")
    kernel = given.pop("depthwise_kernel")
    inner = keras.ops.depthwise_conv(kernel=kernel, **given)
    return keras.ops.conv(inner, pointwise, data_format=given["data_format"])


def take(call: apply.Call) -> Any:
    """Takes rows of a weight; TensorFlow reads only those."""
    table = call.args[0] if call.args else call.kwargs["x"]
    if isinstance(table, keras.Variable) and keras_variables.is_float32(table):
        weight = keras_variables.read(table)
    else:
        weight = tensors.weight_of(table)
    if weight is None or not tensors.is_16_bit(table):
        return apply.apply(call)
    rows = call.run_with(weight, table)
    # A note would keep all rows in float32.
    narrowed = tensors.narrow(rows, tensors.float_dtype(table))
    if context.block.get().in_map:
        # Each row of the map may take the same ones.
        tensors.noted_copy(rows, narrowed, is_weight=True)
    return narrowed


def unbiased_dropout(original: Callable) -> Callable:
    """Returns TensorFlow's dropout, which makes up for just what it drops.

    It draws random numbers in the dtype of its inputs, which holds few between
    0 and 1: at a rate of 0.3 in bfloat16 it dropped 0.305 and multiplied by
    1 / 0.7. The rate becomes the nearest that the format can draw.
    """
    order = "inputs", "rate"

    @functools.wraps(original)
    def dropout(*args: Any, **kwargs: Any) -> Any:
        inputs, rate = (layers.argument(order, args, kwargs, n) for n in order)
        dtype = tensors.float_dtype(inputs)
        is_rate = isinstance(rate, float) and 0.0 < rate < 1.0
        if is_rate and dtype in _formats.SIXTEEN_BIT and context.active_rules():
            step = _formats.LIMITS[dtype].epsilon
            rate = min(max(round(rate / step) * step, step), 1.0 - step)
            args, kwargs = layers.with_argument(
                order, args, kwargs, "rate", rate
            )
        return original(*args, **kwargs)

    return dropout


# All other ops are computed by `apply`.
WAYS: dict[str, apply.Way] = {
    **dict.fromkeys(_LOOPS, carry_float32),
    **dict.fromkeys(logits.LOSSES.values(), logits.with_logits),
    **dict.fromkeys(("cast", "convert_to_tensor"), apply.cast),
    "dot_product_attention": attention.dot_product_attention,
    "separable_conv": separable_conv,
    "take": take,
    "vectorized_map": vectorized_map,
}
