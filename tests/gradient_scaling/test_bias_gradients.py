"""On JAX a bias's gradient is summed over all rows in float32."""

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers

pytestmark = helpers.requires_backend("jax")
SHARES = np.random.default_rng(0).random((8192, 512)).astype("float32") / 16


def of_bias(jit):
    import jax

    def total(bias, shares):
        rows = ops.zeros(shares.shape, dtype="float16")
        made = ops.cast(ops.add(rows, bias), "float32")
        return ops.sum(made * shares)

    gradient = jax.jit(jax.grad(total)) if jit else jax.grad(total)
    return np.asarray(gradient(ops.zeros((512,), "float16"), SHARES))


@pytest.mark.costly
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_bias_gets_the_sum_of_all_rows(jit):
    tfmix.set_global_policy("mixed_float16")
    found, exact = of_bias(jit), SHARES.sum(0)
    assert found.dtype == "float16"
    # This is half a unit of the last place; a sum in float16 is off by three
    # times that.
    assert np.abs(found - exact).max() < 0.0007 * exact.max()


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
