"""A conditional that costs nothing for what it captures, on a CPU.

TensorFlow dissolves a `tf.cond` into the graph around it, with one switch for
each tensor that its branches use: three for each variable of an Adam step,
which takes as long as a tenth of the step if the variables are small. Kept
whole, it is one operation that calls one of two functions. Such a function
runs on one device, so this is only for steps whose variables share one; a
GPU's have their counters on the host. What it takes in lives to its end, so
this is not for large models, whose gradients are freed one by one.

Touches `tf.Operation._set_attr`. Checked on TensorFlow 2.20 and 2.21.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Elements of all variables together: 64 MiB, and under Adam 21 of gradients.
_LARGE = 2**24
_KEPT_WHOLE = tf.compat.v1.AttrValue(b=False)


def cond(
    predicate: Any,
    true_fn: Callable[[], Any],
    false_fn: Callable[[], Any],
    keras_variables: Sequence[Any],
) -> Any:
    """Does what `tf.cond` does.

    Args:
        predicate: Boolean scalar tensor.
        true_fn: Function without arguments that returns a tensor.
        false_fn: The same, for when the predicate is false.
        keras_variables: All `keras.Variable`s that the functions use.

    Returns:
        What the function chosen returns.
    """
    device = "" if is_large(keras_variables) else _only_cpu(keras_variables)
    if tf.executing_eagerly() or not device:
        return tf.cond(predicate, true_fn, false_fn)
    with tf.device(device):
        result = tf.cond(predicate, true_fn, false_fn)
    operation = result.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    operation._set_attr("_lower_using_switch_merge", _KEPT_WHOLE)
    return result


def is_large(keras_variables: Sequence[Any]) -> bool:
    """Returns whether a step over these variables is better taken apart."""
    return sum(math.prod(each.shape) for each in keras_variables) > _LARGE


def _only_cpu(keras_variables: Sequence[Any]) -> str:
    """Returns the one CPU that holds all variables; nothing if none does."""
    devices = {variable._value.device for variable in keras_variables}
    if len(devices) != 1:
        return ""
    (device,) = devices
    is_cpu = tf.DeviceSpec.from_string(device or "").device_type == "CPU"
    return device if is_cpu else ""
