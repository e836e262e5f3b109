"""JAX's products with weights have every derivative, in loops as well."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

RNG = np.random.default_rng(1)


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


@helpers.requires_backend("jax")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_weight_that_is_read_before_a_loop_sums_its_steps_in_float32(policy):
    import jax

    class Rows(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(4, 4))

        def call(self, x):
            kernel = ops.convert_to_tensor(self.kernel)
            return ops.map(lambda row: ops.matmul(row, kernel), x)

    tfmix.set_global_policy(policy)
    model = keras.Sequential([keras.Input((4,), batch_size=4000), Rows()])
    x = np.ones((4000, 4), "float32")

    def total(weights):
        return model.stateless_call(weights, [], x, training=True)[0].sum()

    (gradient,) = jax.grad(total)([v.value for v in model.trainable_variables])
    assert np.all(gradient == 4000)


@helpers.requires_backend("jax")
@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_in_a_loops_steps_has_every_derivative(sign):
    import jax

    class Cell(keras.layers.Layer):
        state_size = 4

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 4))
            self.bias = self.add_weight(shape=(4,), initializer="ones")

        def call(self, x, states):
            change = self.bias + sign * ops.matmul(x, self.kernel)
            new = ops.tanh(change + 0.1 * states[0])
            return new, [new]

    x, found = normal(64, 50, 3), []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(0)
        tfmix.set_global_policy(policy)
        model = keras.Sequential(
            [keras.Input((50, 3)), keras.layers.RNN(Cell())]
        )

        def mean(weights, model=model):
            return model.stateless_call(weights, [], x)[0].mean()

        weights = [v.value for v in model.trainable_variables]
        _, along = jax.jvp(mean, (weights,), (weights,))
        found.append([*jax.jit(jax.grad(mean))(weights), along])
    for right, value in zip(*found, strict=True):
        error = np.linalg.norm(np.ravel(value - right))
        assert error < 0.004 * np.linalg.norm(np.ravel(right))
