"""Compiled functions round like single ops."""

import keras
import numpy as np
import pytest
from keras import ops

from tfmix.tools.diagnostics import programs

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="compiles under JAX alone"
)


X = np.random.default_rng(0).normal(size=1000).astype("float32")
IN_16_BIT = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def _chained(half):
    """A chain without a sum of products, so nothing can be contracted."""
    return (half + 0.1) * (half - 0.3) / 7 * (half + 3)


def _contractible(half):
    return half * 3 + half * half


def _rounded(values, dtype):
    """Rounds to a dtype; returns float64 for further computation."""
    return values.astype(jax.numpy.dtype(dtype)).astype("float64")


def _is_allowed(found, dtype):
    """Returns which results of `_contractible` are rounded correctly.

    Both single ops and contracted ones are allowed: an instruction that
    multiplies and adds rounds once, after the addition.
    """
    half = _rounded(X, dtype)
    triple, square = half * 3, half * half
    ways = [
        _rounded(triple, dtype) + _rounded(square, dtype),
        _rounded(triple, dtype) + square,
        triple + _rounded(square, dtype),
    ]
    return np.any([found == _rounded(way, dtype) for way in ways], axis=0)


def _in_16_bit(steps, dtype):
    return lambda x: ops.cast(steps(ops.cast(x, dtype)), "float32")


@IN_16_BIT
def test_every_16_bit_value_is_rounded_as_op_by_op(dtype):
    steps, x = _in_16_bit(_chained, dtype), ops.convert_to_tensor(X)
    np.testing.assert_array_equal(programs.run(steps, x), steps(x))


@IN_16_BIT
def test_a_product_that_is_added_may_be_rounded_with_the_sum(dtype):
    steps, x = _in_16_bit(_contractible, dtype), ops.convert_to_tensor(X)
    found = programs.run(steps, x)
    assert _is_allowed(np.asarray(found), dtype).all()


@IN_16_BIT
def test_float32_in_between_would_show(dtype):
    wide = _contractible(_rounded(X, dtype).astype("float32"))
    assert not _is_allowed(_rounded(wide, dtype), dtype).all()
