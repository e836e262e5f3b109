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
    """The difference between some tensors and the same ones in float32.

    Attributes:
        relative_error: Norm of the difference over the norm of the float32
            values; 0 where those are all zero, infinite where a value is
            not finite in 16 bit alone.
        cosine: Cosine of the angle between both; 1 where either is zero.
        lost: Whether a value is finite in float32 and is not in 16 bit.
        only_nan: Whether all of those are NaN, none an infinity.
        broken: Whether the float32 values are not finite themselves.
        flushed: Share of the float32 values that are not zero and that the
            format rounds to zero.
        subnormal: Share of the float32 values that are subnormal there.
        headroom_bits: Of the float32 values, in the 16-bit format.
    """

    relative_error: float
    cosine: float
    lost: bool
    only_nan: bool
    broken: bool
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
    pairs = [
        (_array(a) / scale, _array(b))
        for a, b in zip(found, exact, strict=True)
    ]
    if not pairs:
        return Gap(0.0, 1.0, False, False, False, 0.0, 0.0, math.inf)
    a, b = (
        np.concatenate([pair[i].reshape(-1) for pair in pairs]) for i in (0, 1)
    )
    fine = np.isfinite(b)
    lost = fine & ~np.isfinite(a)
    only_nan = bool(lost.any() and np.isnan(a[lost]).all())
    a, b_known = (np.where(fine & ~lost, one, 0.0) for one in (a, b))
    # In units of the largest value: squares of 1e200 leave every range.
    unit = max(np.abs(b_known).max(initial=0.0), 1e-300)
    a, b_known = np.clip(a / unit, -1e150, 1e150), b_known / unit
    error, size, other = (np.dot(v, v) for v in (a - b_known, b_known, a))
    overflows = bool(lost.any())
    measured = ranges.on_host(b * scale, limits)
    return Gap(
        relative_error=_relative(error, size, overflows),
        cosine=_cosine(np.dot(a, b_known), size, other),
        lost=overflows,
        only_nan=only_nan,
        broken=not fine.all(),
        flushed=measured.flushed,
        subnormal=measured.subnormal,
        headroom_bits=measured.headroom_bits,
    )


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(tensor)).astype(np.float64)


def _relative(error: float, size: float, lost: bool) -> float:
    if lost:
        return math.inf
    if size == 0:
        return 0.0
    return float(math.sqrt(error / size))


def _cosine(product: float, size: float, other: float) -> float:
    if size == 0:
        return 1.0
    if other == 0:
        # All that there was is lost.
        return 0.0
    return float(product / math.sqrt(size * other))
