"""Where tensors lie in a 16-bit format's range, and how far from float32."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats


@dataclasses.dataclass(frozen=True)
class Measures:
    """Where one tensor lies in a format's range; shares are of all entries."""

    largest: float  # the largest finite magnitude; 0 without finite entries
    zero: float
    # From half the smallest subnormal to the smallest normal value: the format
    # holds these with lost bits.
    subnormal: float
    # Not zero, and rounded to it: 0 for a tensor that is in the format.
    flushed: float
    # Finite and above a quarter of the format's largest value.
    near_overflow: float
    not_finite: float
    # How often the tensor can be doubled before it overflows: negative if it
    # does already, `-inf` if an entry is not finite, `inf` if all are zero.
    headroom_bits: float


# The order of the columns of `vector`.
COLUMNS = tuple(field.name for field in dataclasses.fields(Measures))[:-1]


def vector(values: Any, limits: _formats.Format) -> Any:
    """Measures one tensor on the device, inside compiled code too.

    Returns float32 of shape `(len(COLUMNS),)`, in their order. Where the
    device flushes subnormals (most do in bfloat16), they count as zeros.
    """
    values = ops.convert_to_tensor(values)
    dtype = keras.backend.standardize_dtype(values.dtype)
    if not keras.backend.is_float_dtype(dtype):
        raise TypeError(
            "`values` must be of a float dtype, such as float16 or float32. "
            f"Received: values of dtype {dtype!r}."
        )
    sizes = ops.abs(ops.reshape(ops.cast(values, "float32"), (-1,)))
    finite = ops.isfinite(sizes)
    # The largest of nothing is an error in some backends: a zero is put in.
    known = ops.append(ops.where(finite, sizes, 0.0), ops.zeros((1,)))
    # One pass for all counts: XLA compiles a loop for each reduction.
    steps = ops.where(finite, sizes, np.float32(np.inf))[:, None]
    above = ops.cast(steps > _thresholds(limits), "int32")
    return ops.concatenate(
        [ops.max(known)[None], _shares(ops.sum(above, 0), ops.size(sizes))]
    )


def _thresholds(limits: _formats.Format) -> np.ndarray:
    """Returns the bounds between the shares, each the last of the lower."""
    # An entry of exactly half the smallest value is a tie: it rounds to zero.
    below_normal = np.nextafter(np.float32(limits.tiny), np.float32(0))
    bounds = [
        0.0,
        limits.smallest / 2,
        below_normal,
        # Two bits below the largest value: the next two doublings overflow.
        limits.max / 4,
        np.finfo(np.float32).max,
    ]
    return np.array(bounds, np.float32)


def _shares(above: Any, size: Any) -> Any:
    """Turns counts above each threshold into the shares between them."""
    # Integers count exactly; float32 stops counting at 2**24.
    count = ops.cast(ops.append(ops.cast(size, "int32"), above), "float32")
    count = count / ops.maximum(count[:1], 1.0)
    zero, flushed, subnormal = (count[i] - count[i + 1] for i in range(3))
    near_overflow = count[4] - count[5]
    return ops.stack([zero, subnormal, flushed, near_overflow, count[5]])


def on_host(values: np.ndarray, limits: _formats.Format) -> Measures:
    """Measures an array that is in the host's memory, as `vector` does."""
    sizes = np.abs(values.astype(np.float32).reshape(-1))
    finite = np.isfinite(sizes)
    largest = np.max(sizes, where=finite, initial=0.0)
    sizes = np.where(finite, sizes, np.inf)
    bounds = _thresholds(limits)
    above = np.array([np.count_nonzero(sizes > bound) for bound in bounds])
    counts = np.append(sizes.size, above) / max(sizes.size, 1)
    zero, flushed, subnormal, _, near_overflow = counts[:-1] - counts[1:]
    shares = (zero, subnormal, flushed, near_overflow, counts[-1])
    return from_vector([largest, *shares], limits)


def from_vector(row: Any, limits: _formats.Format) -> Measures:
    """Turns one row of `vector`, copied to the host, into `Measures`."""
    columns = dict(zip(COLUMNS, map(float, np.asarray(row)), strict=True))
    headroom = math.inf
    if columns["not_finite"] > 0:
        headroom = -math.inf
    elif columns["largest"] > 0:
        headroom = float(math.floor(math.log2(limits.max / columns["largest"])))
    return Measures(headroom_bits=headroom, **columns)


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
    # Of the float32 values, in the 16-bit format, as in `Measures`.
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
    measured = on_host(b * scale, limits)
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
    # TensorFlow makes no array of a bfloat16 scalar.
    flat = [ops.reshape(one, (-1,)) for one in tensors]
    arrays = [np.asarray(ops.convert_to_numpy(one)) for one in flat]
    return np.concatenate([one.astype(np.float64).ravel() for one in arrays])
