"""How one tensor sits in the range of a 16-bit format."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _formats

# Two bits below the largest value: the next two doublings overflow.
NEAR_OVERFLOW_BITS = 2


@dataclasses.dataclass(frozen=True)
class Measures:
    """Where the entries of one tensor lie in a format's range.

    Shares are counted over all entries, between 0 and 1.

    Attributes:
        largest: The largest finite magnitude; 0 without finite entries.
        zero: Share of exact zeros.
        subnormal: Share that the format holds with lost bits only, from
            half the smallest subnormal to the smallest normal value.
        flushed: Share that is not zero and that the format rounds to zero.
            Always 0 for a tensor that is already in the format.
        near_overflow: Share of finite entries above a quarter of the largest
            value, those that the format cannot hold included.
        not_finite: Share of infinities and NaNs.
        headroom_bits: How often the tensor can be doubled before it
            overflows: negative if it does already, `-inf` if an entry is not
            finite, `inf` if there is nothing but zeros.
    """

    largest: float
    zero: float
    subnormal: float
    flushed: float
    near_overflow: float
    not_finite: float
    headroom_bits: float


# The order of the columns of `vector`.
COLUMNS = tuple(
    field.name
    for field in dataclasses.fields(Measures)
    if field.name != "headroom_bits"
)


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
        limits.max / 2**NEAR_OVERFLOW_BITS,
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
    return Measures(headroom_bits=_headroom(columns, limits), **columns)


def _headroom(columns: dict[str, float], limits: _formats.Format) -> float:
    if columns["not_finite"] > 0:
        return -math.inf
    if columns["largest"] == 0:
        return math.inf
    return float(math.floor(math.log2(limits.max / columns["largest"])))
