"""A finite constant that 16-bit tensors meet in a Keras op stays finite.

`scores + (1 - mask) * -1e9` is infinity times 0 in float16. An op that is
given such a number computes in float32, and what it returns saturates.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfmix import _formats
from tfmix._keras import op_places
from tfmix.in_force.process_wide import tensors

# The ops that a number is given to beside a tensor, or beside a dtype.
OPS = (
    "add",
    "array",
    "cast",
    "clip",
    "convert_to_tensor",
    "divide",
    "divide_no_nan",
    "full",
    "full_like",
    "maximum",
    "minimum",
    "multiply",
    "subtract",
    "true_divide",
    "where",
)


def saturating(original: Callable) -> Callable:
    """Returns a Keras op that no finite number makes infinite in 16 bit."""
    position = op_places.dtype_position(original)

    @functools.wraps(original)
    def op(*args: Any, **kwargs: Any) -> Any:
        # Asked first, as it is rare.
        if not _is_any_large((*args, *kwargs.values())):
            return original(*args, **kwargs)
        wanted = op_places.wanted_dtype(args, kwargs, position)
        dtype = wanted or tensors.only_16_bit((args, kwargs))
        if dtype not in _formats.SIXTEEN_BIT or not _is_any_large(
            (*args, *kwargs.values()), _formats.limits(dtype).max
        ):
            return original(*args, **kwargs)
        args, kwargs = tensors.map_leaves((args, kwargs), tensors.widen)
        if wanted is not None:
            args, kwargs = op_places.with_float32(args, kwargs, position)
        return saturated(original(*args, **kwargs), str(dtype))

    return op


def _is_any_large(values: Any, limit: float = _formats.FLOAT16.max) -> bool:
    """Says whether a finite number among some values is beyond a limit."""
    return any(
        limit < abs(value) < math.inf for value in values if _is_number(value)
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == () and value.dtype.kind in "iuf"
    return isinstance(value, int | float | np.integer | np.floating)


def saturated(value: Any, dtype: str) -> Any:
    """Casts a float32 tensor; finite numbers stay finite.

    What is beyond the format becomes half of its largest value: a score may
    be added to it. Infinity stays infinity. Anything else is left alone.
    """
    if tensors.float_dtype(value) != "float32":
        return value
    limit = _formats.limits(dtype).max
    beyond = keras.ops.logical_and(
        keras.ops.isfinite(value), keras.ops.abs(value) > limit
    )
    within = keras.ops.where(beyond, keras.ops.sign(value) * (limit / 2), value)
    return keras.ops.cast(within, dtype)
