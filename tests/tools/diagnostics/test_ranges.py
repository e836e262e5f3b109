"""The measures of a tensor are exact at the limits of each format."""

import math

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

from tfmix import _formats
from tfmix.tools.diagnostics import ranges

FLOAT16 = _formats.FLOAT16


def measured(values, fmt="float16"):
    limits = _formats.LIMITS[fmt]
    row = ops.convert_to_numpy(ranges.vector(values, limits))
    return ranges.from_vector(row, limits)


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
        (0.0, "zero"),
        (2.0**-25, "flushed"),
        (np.nextafter(np.float32(2.0**-25), np.float32(1)), "subnormal"),
        (np.nextafter(np.float32(2.0**-14), np.float32(0)), "subnormal"),
        (2.0**-14, None),
        (65504.0 / 4, None),
        (np.nextafter(np.float32(65504 / 4), np.float32(1e9)), "near_overflow"),
        (1e9, "near_overflow"),
        (math.inf, "not_finite"),
        (-math.nan, "not_finite"),
    ],
)
def test_each_value_is_counted_in_one_share(value, share):
    found = measured(np.array([value, 1.0], "float32"))
    shares = {
        name: getattr(found, name)
        for name in ranges.COLUMNS
        if name != "largest"
    }
    assert shares == {name: 0.5 * (name == share) for name in shares}


def test_flushed_agrees_with_the_cast_to_the_format():
    values = (10.0 ** np.random.default_rng(0).uniform(-12, 4, 10_000)).astype(
        "float32"
    )
    expected = np.mean(values.astype("float16") == 0)
    assert measured(values).flushed == pytest.approx(expected)
    assert 0 < expected < 1


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
)
def test_every_float_dtype_is_measured(dtype):
    found = measured(np.array([0.5, -4.0], dtype))
    assert found.largest == 4.0


def test_the_vector_stays_a_device_tensor_in_a_compiled_function():
    def compiled(values):
        return ranges.vector(values, FLOAT16)

    if keras.backend.backend() == "jax":
        import jax

        compiled = jax.jit(compiled)
    else:
        import tensorflow as tf

        compiled = tf.function(compiled, jit_compile=True)
    row = compiled(ops.ones((2, 3), "float16"))
    assert ranges.from_vector(row, FLOAT16).largest == 1.0
