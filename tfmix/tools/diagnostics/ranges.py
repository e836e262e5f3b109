"""Measures how far tensors are from the same ones in float32."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from keras import ops

from tfmix import _formats


def _bounds(limits: _formats.Format) -> np.ndarray:
    """Returns the upper bounds of what is zero, flushed and subnormal."""
    # An entry of exactly half the smallest value is a tie, rounded to zero.
    below_normal = np.nextafter(np.float32(limits.tiny), np.float32(0))
    return np.array([0.0, limits.smallest / 2, below_normal], np.float32)


def _headroom(top: float, not_finite: float, limits: _formats.Format) -> float:
    if not_finite:
        return -math.inf
    return float(math.floor(math.log2(limits.max / top))) if top else math.inf


@dataclasses.dataclass(frozen=True)
class Gap:
    """The difference between some tensors and the same ones in float32."""

    # This is the norm of the difference over the norm of the float32 values;
    # 0 if those are all zero, infinite if `lost`.
    relative_error: float
    # This is the cosine of the angle between both; 1 if the float32 values are
    # all zero.
    cosine: float
    lost: bool  # true if a value is finite in float32 and not in 16 bit
    only_nan: bool  # true if the lost values are all NaN, and not infinite
    broken: bool  # true if a float32 value is not finite
    # The share of the float32 values that the 16-bit format rounds to zero.
    flushed: float
    # The share that it holds with fewer bits: below its normal values.
    subnormal: float
    # How often the float32 values can be doubled before they overflow; negative
    # if they do already, `-inf` if one is not finite, `inf` if all are zero.
    headroom_bits: float
    largest: float = 0.0  # the largest float32 value, times the scale


def gap(
    near: Sequence[Any],
    exact: Sequence[Any],
    limits: _formats.Format,
    scale: float = 1.0,
) -> Gap:
    """Compares 16-bit with float32 tensors, each list as one long vector.

    `near` was multiplied by `scale`, so `exact` is measured as if it was, too.
    """
    pairs = [*zip(map(_flat, near), map(_flat, exact), strict=True)]
    top = max((largest(right) for _, right in pairs), default=0.0)
    bounds = _bounds(limits) / scale
    sums = np.full(_SUMS, np.nan)
    if top == 0.0 or _ORDINARY[0] < top < _ORDINARY[1]:
        with np.errstate(over="ignore", invalid="ignore"):
            sums = _sums(pairs, np.float32, scale, 1.0, bounds)
    if not np.isfinite(sums).all():
        # Squares of 1e200 would overflow, so the largest value is the unit.
        sums = _sums(pairs, np.float64, scale, max(top, 1e-300), bounds)
    error, size, other, product, *above, lost, nan, broken = sums
    relative, cosine = (math.sqrt(error / size), 0.0) if size else (0.0, 1.0)
    if size and other:
        cosine = product / math.sqrt(size * other)
    count = max(sum(right.size for _, right in pairs), 1)
    return Gap(
        math.inf if lost else relative,
        float(cosine),
        bool(lost),
        bool(lost and nan == lost),
        bool(broken),
        (above[0] - above[1]) / count,
        (above[1] - above[2]) / count,
        _headroom(top * scale, broken, limits),
        top * scale,
    )


# A block fits into a core's cache, so it is read from memory once.
_BLOCK = 2**15
# Squares of numbers between these, and their sums, fit into float32.
_ORDINARY = 1e-12, 1e12
_SUMS = 10


def largest(tensor: Any) -> float:
    """Returns the largest finite magnitude, 0 without one."""
    tops = [0.0]
    for (block,) in _blocks([_flat(tensor)]):
        sizes = np.abs(block.astype(np.float32, copy=False))
        top = float(sizes.max())
        if not math.isfinite(top):
            top = float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))
        tops.append(top)
    return max(tops)


def _sums(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    kind: type[np.floating],
    scale: float,
    unit: float,
    bounds: np.ndarray,
) -> np.ndarray:
    """Returns the sums and counts that `gap` reads, in its order."""
    total = np.zeros(_SUMS)
    for near, right in (blocks for pair in pairs for blocks in _blocks(pair)):
        near, right = near.astype(kind) / kind(scale), right.astype(kind)
        sizes = np.abs(right)
        above = [np.count_nonzero(sizes > bound) for bound in bounds]
        fine, alike = np.isfinite(right), np.isfinite(near)
        faults: list[Any] = [0, 0, 0]
        if not (fine.all() and alike.all()):
            lost = fine & ~alike
            faults = [lost.sum(), np.isnan(near[lost]).sum(), (~fine).sum()]
            near, right = (np.where(fine & alike, x, 0) for x in (near, right))
        if kind is np.float64:
            near, right = np.clip(near / unit, -1e150, 1e150), right / unit
        wrong = near - right
        products = [(wrong, wrong), (right, right), (near, near), (near, right)]
        total += [*(np.dot(*pair) for pair in products), *above, *faults]
    return total


def _blocks(arrays: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    for start in range(0, arrays[0].size, _BLOCK):
        yield [array[start : start + _BLOCK] for array in arrays]


def _flat(tensor: Any) -> np.ndarray:
    # TensorFlow cannot convert a bfloat16 scalar to an array.
    tensor = tensor if len(tensor.shape) else ops.reshape(tensor, (1,))
    return np.asarray(ops.convert_to_numpy(tensor)).reshape(-1)
