"""Passes small numbers to logarithms, roots and quotients in float32.

Torch's autocast returns float32 from such ops. Here every op returns 16 bit, so
that your code never meets another dtype. The float32 value is kept behind the
result (`float32_values`) until a product uses it, or until it meets larger
activations, as a norm does that they are divided by.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tfmix._keras import global_state, op_places
from tfmix.ops import (
    finite_constants,
    float32_ops,
    float32_values,
    tensors,
    weight_gradients,
)
from tfmix.ops.float32_values import Known, Value

# The derivative is unbounded near 0; for the last three at some arguments.
_ROOTS = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal")
_NORMS = ("norm", "normalize", "std")
_QUOTIENTS = (
    *("divide", "divide_no_nan", "true_divide"),
    *("__truediv__", "__rtruediv__"),
)
_POWERS = ("power", "__pow__")
# These sum what would be lost in 16 bit.
_SUMS = ("sum", "mean", "var", "average", "prod", "segment_sum")
# Their results can be small or large for arguments that are neither.
_CURVED = ("square", "exp", "expm1")
# Only ops with an unbounded derivative use the float32 value of these. Their
# argument is a probability p, or 1 - p, which 16 bit rounds.
_SATURATING = ("softmax", "sigmoid", "tanh", "softplus", "hard_sigmoid")
# The same holds for these. They multiply a gradient that may be beyond float16,
# such as that of `log(relu(x) + 1e-6)`, by 0.
_FLAT = ("relu", "abs", "absolute", "maximum", "minimum", "clip", "where")
_TIMES = ("multiply", "__mul__", "__rmul__")
_LINEAR = (
    *("add", "subtract", "maximum", "minimum", "clip", "where"),
    *("__add__", "__radd__", "__sub__", "__rsub__"),
)
# These return their argument's values.
_ALIKE = (
    *("negative", "abs", "absolute", "max", "min", "amax", "amin", "relu"),
    *("reshape", "transpose", "expand_dims", "squeeze", "broadcast_to"),
    *("concatenate", "stack", "stop_gradient", "__neg__", "__abs__"),
)
_OPS = (
    *(*_ROOTS, *_NORMS, *_QUOTIENTS, *_POWERS, *_SUMS, *_CURVED),
    *(*_SATURATING, *_TIMES, *_LINEAR, *_ALIKE, "moments"),
)
_ELEMENTWISE = (*_TIMES, *_LINEAR, *_QUOTIENTS)
_LOSING = (*_SUMS, *_CURVED, *_POWERS, "moments")
# A smaller number is one of a sum's last digits in bfloat16, and its powers in
# a layer may underflow in float16.
_SMALL = 2.0**-6


def followed(op: Callable, name: str) -> Callable:
    """Returns an op that keeps and uses the float32 values behind 16 bit."""
    dtype_at = op_places.dtype_position(op)

    @functools.wraps(op)
    def follow(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(tensors.snapshot, args))
        values = (*args, *kwargs.values())
        if not tensors.holds_16_bit(values) or global_state.on_shapes_only():
            return op(*args, **kwargs)
        notes = float32_values.find(values)
        loses = _loses(name, values)
        begins = loses or name in (*_SATURATING, *_FLAT)
        if not (notes or begins or _has_copy(name, values)):
            return op(*args, **kwargs)
        if op_places.wanted_dtype(args, kwargs, dtype_at) is not None:
            return op(*args, **kwargs)
        dtype = tensors.only_16_bit((args, kwargs))
        if dtype is None:
            # Beside float32 the result is float32.
            args, kwargs = tensors.map_leaves((args, kwargs), _if_lost)
            return op(*args, **kwargs)
        if not (notes or begins or _is_exact(values)):
            # This is a product of a weight and activations.
            return op(*args, **kwargs)
        if name == "moments":
            return _moments(op, args, kwargs, dtype)
        if name in _SUMS:
            value = float32_ops.widened_call(op, args, kwargs)
            return _summed(value, dtype)
        in_float32 = functools.partial(_computed, op, args, kwargs)
        if any(note.is_wide for note in notes) or _asks(name, args):
            value = in_float32({})
            if _is_activation(value, values):
                return tensors.narrow(value, dtype)
            return _kept(value, name, values, dtype)
        result = op(*args, **kwargs)
        is_same = any(result is value for value in values)
        if is_same or _is_activation(result, values):
            return result
        depth = 1 + max((note.depth for note in notes), default=0)
        is_lost = loses or not begins and not notes
        is_lost = is_lost or any(note.is_lost for note in notes)
        note = Value(in_float32, depth, is_lost, is_exact=_is_exact(values))
        float32_values.put(result, note)
        return result

    return follow


def _loses(name: str, values: tuple) -> bool:
    """Returns whether 16 bit may lose what an op computes of 16-bit tensors."""
    if name in _ELEMENTWISE:
        if name in _TIMES and values[0] is values[1]:
            return True
        return any(_is_small(value) for value in values)
    return name in _LOSING


def _is_small(value: Any) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating)
    return number and 0 < abs(value) < _SMALL


def _asks(name: str, args: tuple) -> bool:
    """Returns whether an op's derivative is unbounded at a noted input."""
    at = args[:1]
    if name in _QUOTIENTS:
        at = args[:1] if name == "__rtruediv__" else args[1:2]
    elif name in _POWERS:
        exponent = args[1]
        is_whole = isinstance(exponent, int | float) and exponent >= 0
        if is_whole and float(exponent).is_integer():
            return False
    elif name not in (*_ROOTS, *_NORMS):
        return False
    return bool(float32_values.find(at))


def _has_copy(name: str, values: tuple) -> bool:
    """Returns whether a 16-bit copy of a variable is added or multiplied."""
    return name in _ELEMENTWISE and any(
        weight_gradients.source(value) is not None for value in values
    )


def _is_exact(values: tuple) -> bool:
    """Returns whether all 16-bit tensors have exact float32 values."""
    return all(
        weight_gradients.is_exact(value)
        for value in values
        if tensors.is_16_bit(value)
    )


def _if_lost(value: Any) -> Any:
    """Returns a 16-bit tensor's known float32 value, else the tensor."""
    is_known = weight_gradients.source(value) is not None
    if is_known or any(note.is_lost for note in float32_values.find([value])):
        return weight_gradients.exact(value)
    return value


def _computed(op: Callable, args: tuple, kwargs: dict, known: Known) -> Any:
    exact = functools.partial(weight_gradients.exact, known=known)
    args, kwargs = tensors.map_leaves((args, kwargs), exact)
    return op(*args, **kwargs)


def _summed(value: Any, dtype: str) -> Any:
    """Rounds a sum that was computed in float32, and adds a note."""
    result = tensors.narrow(value, dtype)
    float32_values.keep(result, value)
    return result


def _moments(op: Callable, args: tuple, kwargs: dict, dtype: str) -> tuple:
    values = float32_ops.widened_call(op, args, kwargs)
    # The variance of large numbers is beyond float16, and Keras limits it.
    results = tuple(finite_constants.finite(x, dtype) for x in values)
    for result, value in zip(results, values, strict=True):
        float32_values.keep(result, value)
    return results


def _kept(value: Any, name: str, values: tuple, dtype: str) -> Any:
    """Rounds what was computed in float32, and keeps it for what uses it."""
    if name in _QUOTIENTS:
        # A small number beside 0 stays above 0, as `fitting` promises.
        result = finite_constants.finite(value, dtype)
    else:
        result = tensors.narrow(value, dtype)
    exact = _is_exact(values)
    float32_values.keep(result, value, is_wide=True, is_exact=exact)
    return result


def _is_activation(result: Any, values: tuple) -> bool:
    """Returns whether an op applied small numbers to activations.

    Its result is as large as the activations, such as a layer's input divided
    by its norm. A float32 version of it beside the 16-bit one would cost
    memory.
    """
    notes = float32_values.find(values)
    alike = [value for value in values if _is_alike(value, result)]
    return (
        any(note.is_lost for note in notes)
        and not any(note.is_lost for note in float32_values.find(alike))
        and any(map(tensors.is_16_bit, alike))
        and not _is_exact(values)
    )


def _is_alike(value: Any, other: Any) -> bool:
    """Returns whether two tensors have the same shape."""
    shape = getattr(value, "shape", None)
    return shape is not None and bool(other.shape == shape)


OPS = {name: functools.partial(followed, name=name) for name in _OPS}
