"""How far 16-bit results lie from the same results in float32."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from tfmix import _formats
from tfmix.doctor import ranges


@dataclasses.dataclass(frozen=True)
class Gap:
    """The difference between some tensors and the same ones in float32."""

    # Norm of the difference over the norm of the float32 values; 0 where those
    # are all zero, infinite where a value is not finite in 16 bit alone.
    relative_error: float
    # Of the angle between both; 1 where the float32 values are all zero.
    cosine: float
    lost: bool  # whether a value is finite in float32 and not in 16 bit
    only_nan: bool  # whether all of those are NaN, none an infinity
    broken: bool  # whether the float32 values are not finite themselves
    # Of the float32 values, in the 16-bit format, as in `ranges.Measures`.
    flushed: float
    subnormal: float
    headroom_bits: float


def gap(
    found: Sequence[Any],
    exact: Sequence[Any],
    limits: _formats.Format,
    scale: float = 1.0,
) -> Gap:
    """Compares 16-bit with float32 tensors as if each list were one vector.

    `found` was multiplied by `scale`, and so are the ranges of `exact`.
    """
    if not found:
        return Gap(0.0, 1.0, False, False, False, 0.0, 0.0, math.inf)
    a, b = _vector(found) / scale, _vector(exact)
    fine = np.isfinite(b)
    lost = fine & ~np.isfinite(a)
    only_nan = bool(lost.any() and np.isnan(a[lost]).all())
    a, b_known = (np.where(fine & ~lost, one, 0.0) for one in (a, b))
    # In units of the largest value: squares of 1e200 leave every range.
    unit = max(np.abs(b_known).max(initial=0.0), 1e-300)
    a, b_known = np.clip(a / unit, -1e150, 1e150), b_known / unit
    error, size, other = (np.dot(v, v) for v in (a - b_known, b_known, a))
    relative, cosine = (math.sqrt(error / size), 0.0) if size else (0.0, 1.0)
    if size and other:
        cosine = float(np.dot(a, b_known) / math.sqrt(size * other))
    measured = ranges.on_host(b * scale, limits)
    return Gap(
        math.inf if lost.any() else relative,
        cosine,
        bool(lost.any()),
        only_nan,
        not fine.all(),
        measured.flushed,
        measured.subnormal,
        measured.headroom_bits,
    )


def _vector(tensors: Sequence[Any]) -> np.ndarray:
    arrays = [np.asarray(ops.convert_to_numpy(one)) for one in tensors]
    return np.concatenate([one.astype(np.float64).ravel() for one in arrays])
