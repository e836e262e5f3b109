"""On JAX a bias' gradient is summed over all rows in float32."""

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers

pytestmark = helpers.requires_backend("jax")
ROWS = 16384


def of_bias(policy, jit):
    import jax

    def total(bias):
        rows = ops.full((ROWS, 2), 2.0**-12, dtype="float16")
        return ops.sum(ops.cast(ops.add(rows, bias), "float32")) / 8

    tfmix.set_global_policy(policy)
    gradient = jax.grad(total)
    gradient = jax.jit(gradient) if jit else gradient
    return np.asarray(gradient(ops.array([1.0, 2.0], "float16")))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_bias_gets_the_sum_of_all_rows(jit):
    found = of_bias("mixed_float16", jit)
    assert found.dtype == "float16"
    np.testing.assert_array_equal(found, [ROWS / 8] * 2)


def test_without_a_policy_nothing_is_replaced():
    before = keras.src.backend.numpy.add
    tfmix.set_global_policy("mixed_float16")
    assert keras.src.backend.numpy.add is not before
    tfmix.set_global_policy("float32")
    assert keras.src.backend.numpy.add is before


def test_the_sum_itself_and_forward_mode_are_as_they_were():
    import jax

    x, bias = ops.ones((3, 2), "float16"), ops.array([1e-3, 5.0], "float16")
    plain = np.asarray(ops.add(x, bias))
    tfmix.set_global_policy("mixed_float16")
    np.testing.assert_array_equal(plain, np.asarray(ops.add(x, bias)))
    same, moved = jax.jvp(ops.add, (x, bias), (x, bias))
    np.testing.assert_array_equal(plain, np.asarray(same))
    np.testing.assert_array_equal(plain, np.asarray(moved))


def test_a_variable_is_read_in_the_dtype_of_its_layer():
    tfmix.set_global_policy("mixed_float16")
    layer = keras.layers.Dense(2)
    assert layer(np.ones((3, 4), "float32")).dtype == "float16"
    assert layer.bias.dtype == "float32"
