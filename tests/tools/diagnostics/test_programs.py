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


def _in_16_bit(steps, dtype):
    return lambda x: ops.cast(steps(ops.cast(x, dtype)), "float32")


@IN_16_BIT
def test_every_16_bit_value_is_rounded_as_op_by_op(dtype):
    steps, x = _in_16_bit(_chained, dtype), ops.convert_to_tensor(X)
    np.testing.assert_array_equal(programs.run(steps, x), steps(x))
