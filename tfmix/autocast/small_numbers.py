"""Passes small numbers to logarithms, roots and quotients in float32.

Torch's autocast returns float32 from such ops. Here every op returns 16 bit, so
that your code never meets another dtype. The float32 value is kept behind the
result (`float32_values`) until a product uses it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tfmix._keras import op_places
from tfmix.autocast import finite_constants
from tfmix.gradient_scaling import float32_values, tensors, weight_gradients
from tfmix.gradient_scaling.float32_values import Known, Value

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
OPS = (
    *(*_ROOTS, *_NORMS, *_QUOTIENTS, *_POWERS, *_SUMS, *_CURVED),
    *(*_SATURATING, *_TIMES, *_LINEAR, *_ALIKE, "moments"),
)
_ELEMENTWISE = (*_TIMES, *_LINEAR, *_QUOTIENTS)
_BEGIN = (*_SUMS, *_CURVED, *_POWERS, *_SATURATING, "moments")
# A smaller number is one of a sum's last digits in bfloat16, and its powers in
# a layer may underflow in float16.
_SMALL = 2.0**-6


def followed(op: Callable, name: str) -> Callable:
    """Returns an op that keeps and uses the float32 values behind 16 bit."""
    dtype_at = op_places.dtype_position(op)

    @functools.wraps(op)
    def follow(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(weight_gradients.snapshot, args))
        values = (*args, *kwargs.values())
        notes = float32_values.find(values)
        begins = _begins(name, values)
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
            args, kwargs = tensors.map_leaves((args, kwargs), tensors.widen)
            return _summed(op(*args, **kwargs), dtype)
        in_float32 = functools.partial(_computed, op, args, kwargs)
        if any(note.is_wide for note in notes) or _asks(name, args):
            return _kept(in_float32({}), name, values, dtype)
        result = op(*args, **kwargs)
        depth = 1 + max((note.depth for note in notes), default=0)
        is_lost = (begins or not notes) and name not in _SATURATING
        is_lost = is_lost or any(note.is_lost for note in notes)
        if not any(result is value for value in values):
            exact = _is_exact(values)
            note = Value(in_float32, depth, is_lost, is_exact=exact)
            float32_values.put(result, note)
        return result

    return follow


def _begins(name: str, values: tuple) -> bool:
    """Returns whether an op on tensors without a note adds one."""
    if name in _ELEMENTWISE:
        if name in _TIMES and values[0] is values[1]:
            return True
        return any(_is_small(value) for value in values)
    return name in _BEGIN


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
    result = tensors.narrow_once(value, dtype)
    float32_values.keep(result, value)
    return result


def _moments(op: Callable, args: tuple, kwargs: dict, dtype: str) -> tuple:
    args, kwargs = tensors.map_leaves((args, kwargs), tensors.widen)
    values = op(*args, **kwargs)
    # The variance of large numbers is beyond float16, and Keras limits it.
    results = tuple(finite_constants.finite(x, dtype) for x in values)
    for result, value in zip(results, values, strict=True):
        float32_values.keep(result, value)
    return results


def _kept(value: Any, name: str, values: tuple, dtype: str) -> Any:
    """Rounds what was computed in float32, and keeps it if it stays small.

    A result that is larger than the wide tensor it comes from, such as a
    layer's activations divided by their norm, is not wide any more: both
    versions of it would cost memory.
    """
    wide = [x for x in values if _is_wide(name, x)]
    is_wide = name in _ROOTS or any(_is_alike(value, x) for x in wide)
    if is_wide and name in _QUOTIENTS:
        # A small number beside 0 stays above 0, as `fitting` promises.
        result = finite_constants.finite(value, dtype)
    else:
        result = tensors.narrow(value, dtype)
    exact = _is_exact(values)
    float32_values.keep(
        result, value, is_lost=is_wide, is_wide=is_wide, is_exact=exact
    )
    return result


def _is_wide(name: str, value: Any) -> bool:
    asked = name in (*_QUOTIENTS, *_POWERS)
    notes = float32_values.find([value])
    return any(note.is_wide or asked for note in notes)


def _is_alike(value: Any, other: Any) -> bool:
    """Returns whether two tensors have the same shape."""
    shape = getattr(other, "shape", None)
    return shape is not None and bool(value.shape == shape)
