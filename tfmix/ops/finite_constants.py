"""Keeps constants finite, and not zero, where they meet 16-bit tensors.

`scores + (1 - mask) * -1e9` is infinity times 0 in float16, and `x / (x +
1e-9)` is 0 divided by 0. An op or operator with such a number computes in
float32, and its result is limited to the 16-bit range.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfmix import _formats
from tfmix._keras import op_places, scalars
from tfmix.ops import float32_ops, tensors

_NUMBERS = (int, float, np.integer, np.floating)
# A product may round to zero. In other ops, a number that would become zero is
# there to prevent a division by zero.
_PRODUCTS = frozenset(
    ("multiply", "divide", "divide_no_nan", "true_divide")
    + ("__mul__", "__rmul__", "__truediv__", "__rtruediv__")
)


def fitting(original: Callable, name: str) -> Callable:
    """Wraps an op so that no number becomes infinite, or zero, in 16 bit."""
    position = op_places.dtype_position(original)

    @functools.wraps(original)
    def op(*args: Any, **kwargs: Any) -> Any:
        # This is rare, so it is tested first.
        numbers = [x for x in (*args, *kwargs.values()) if _is_number(x)]
        if not (numbers and _is_any_unfit(numbers)):
            return original(*args, **kwargs)
        if name in scalars.CAST_NUMBERS:
            args = tuple(map(_plain, args))
        wanted = op_places.wanted_dtype(args, kwargs, position)
        dtype = wanted or tensors.only_16_bit((args, kwargs))
        if dtype not in _formats.SIXTEEN_BIT or not _is_any_unfit(
            numbers, _formats.limits(dtype)
        ):
            return original(*args, **kwargs)
        result = float32_ops.widened_call(original, args, kwargs, position)
        if name not in _PRODUCTS:
            result = _not_zero(result, str(dtype))
        return finite(result, str(dtype))

    return op


def _is_any_unfit(
    numbers: Any, limits: _formats.Format = _formats.FLOAT16
) -> bool:
    """Returns whether a number would be infinite, or zero, in a format."""
    return any(
        limits.max < abs(number) < math.inf
        # Half of the smallest number rounds to zero.
        or 0 < abs(number) <= limits.smallest / 2
        for number in numbers
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == () and value.dtype.kind in "iuf"
    return isinstance(value, _NUMBERS)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def finite(value: Any, dtype: str) -> Any:
    """Casts a float32 tensor; finite numbers stay finite.

    Numbers beyond the format become half of its largest value, because a score
    may be added to them. Infinity stays infinity. Anything else is returned
    unchanged.
    """
    if tensors.float_dtype(value) != "float32":
        return value
    limit = _formats.limits(dtype).max
    beyond = keras.ops.logical_and(
        keras.ops.isfinite(value), keras.ops.abs(value) > limit
    )
    within = keras.ops.where(beyond, keras.ops.sign(value) * (limit / 2), value)
    return keras.ops.cast(within, dtype)


def _not_zero(value: Any, dtype: str) -> Any:
    """Replaces what a cast would round to zero by the smallest normal number.

    Some processors read smaller numbers as zero. The gradient is that of the
    cast.
    """
    if tensors.float_dtype(value) != "float32":
        return value
    ops, limits = keras.ops, _formats.limits(dtype)
    size = ops.abs(value)
    lost = ops.logical_and(size > 0, size <= limits.smallest / 2)
    moved = ops.where(lost, ops.sign(value) * limits.tiny - value, 0.0)
    return value + ops.stop_gradient(moved)


# These ops and operators take a number beside a tensor, or beside a dtype.
_OPS = (
    *("add", "subtract", "multiply", "divide", "divide_no_nan", "true_divide"),
    *("maximum", "minimum", "clip", "where"),
    *("array", "cast", "convert_to_tensor", "full", "full_like"),
    *scalars.NAMES,
)
OPS = {name: functools.partial(fitting, name=name) for name in _OPS}
