"""The measures of a tensor are exact at the limits of each format."""

import math

import ml_dtypes
import numpy as np
import pytest

from tfmix import _formats
from tfmix.tools.diagnostics import ranges


def measured(values, fmt="float16"):
    """Measures values by their distance from themselves."""
    values = np.asarray(values)
    return ranges.gap([values], [values], _formats.LIMITS[fmt])


@pytest.mark.parametrize(
    ("fmt", "values", "expected"),
    [
        ("float16", [0.0, -65504.0], 0),
        ("float16", [0.0, -8188.0], 3),
        ("float16", [0.0, -(2.0**17)], -2),
        ("bfloat16", [0.0, -1.0], 127),
        ("float16", [1.0, math.inf], -math.inf),
        ("float16", [0.0, 0.0], math.inf),
        ("float16", np.zeros((0,), "float32"), math.inf),
    ],
)
def test_headroom_counts_whole_doublings(fmt, values, expected):
    assert measured(values, fmt).headroom_bits == expected


@pytest.mark.parametrize(
    ("value", "share"),
    [
        (0.0, None),
        (2.0**-25, "flushed"),
        (np.nextafter(np.float32(2.0**-25), np.float32(1)), "subnormal"),
        (np.nextafter(np.float32(2.0**-14), np.float32(0)), "subnormal"),
        (2.0**-14, None),
    ],
)
def test_each_small_value_is_counted_in_one_share(value, share):
    found = measured(np.array([value, 1.0], "float32"))
    assert found.flushed == 0.5 * (share == "flushed")
    assert found.subnormal == 0.5 * (share == "subnormal")


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
)
def test_every_float_dtype_is_measured(dtype):
    assert measured(np.array([0.5, -4.0], dtype)).largest == 4.0
