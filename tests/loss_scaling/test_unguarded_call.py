"""A bad batch leaves no NaN in running statistics, in any loop."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

ON_JAX = keras.backend.backend() == "jax"
X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
BAD = np.where(np.arange(4) == 1, np.inf, X).astype("float32")
MODES = ("eager", "jit") if ON_JAX else ("eager", "graph", "jit")


def network(inputs=4):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(8, "relu"),
            layers.BatchNormalization(),
            layers.Dense(4),
        ]
    )


def step_on_tensorflow(model, mode):
    import tensorflow as tf

    optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    if mode != "eager":
        optimizer.build(model.trainable_variables)
        step = tf.function(step, jit_compile=mode == "jit")
    return step


def step_on_jax(model, mode):
    import jax

    def called(weights, frozen, x):
        return model.stateless_call(weights, frozen, x, training=True)

    def loss(weights, frozen, x):
        y, frozen = called(weights, frozen, x)
        return ops.mean(y**2), frozen

    slope = jax.grad(loss, has_aux=True)
    slope = jax.jit(slope) if mode == "jit" else slope
    optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        weights = [v.value for v in model.trainable_variables]
        frozen = [v.value for v in model.non_trainable_variables]
        slopes, frozen = slope(weights, frozen, x)
        optimizer.apply(slopes, model.trainable_variables)
        for variable, value in zip(
            model.non_trainable_variables, frozen, strict=True
        ):
            variable.assign(value)

    return step


make_step = step_on_jax if ON_JAX else step_on_tensorflow


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_bad_batch_leaves_statistics_as_they_were(policy, mode):
    tfmix.set_global_policy(policy)
    model = network()
    step = make_step(model, mode)
    step(X)
    before = helpers.snapshot(model.variables)
    step(BAD)
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, helpers.to_numpy(variable))
    step(X)
    after = helpers.snapshot(model.variables)
    assert all(np.isfinite(each).all() for each in after)
    assert not any(map(np.array_equal, before, after))


@pytest.mark.costly
def test_statistics_are_those_of_plain_keras():
    found = []
    for policy in ("float32", "mixed_bfloat16"):
        tfmix.set_global_policy(policy)
        model = network()
        model.layers[0].set_weights([np.ones((4, 8)), np.zeros(8)])
        step = make_step(model, MODES[-1])
        for _ in range(2):
            step(np.abs(np.round(X)))
        found.append(helpers.to_numpy(model.layers[1].moving_mean))
    np.testing.assert_allclose(*found, rtol=0.02)


class Smallest(keras.layers.Layer):
    """Keeps the smallest number seen, infinite at first."""

    def build(self, shape):
        self.smallest = self.add_weight(
            shape=(1,),
            initializer=lambda *a, **k: ops.full((1,), np.inf),
            trainable=False,
            name="smallest",
        )

    def call(self, x):
        seen = ops.cast(ops.min(x), "float32")
        self.smallest.assign(ops.minimum(self.smallest, seen))
        return x


@helpers.requires_backend("tensorflow")
def test_an_infinite_initial_value_is_not_a_bad_batch():
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), Smallest(), layers.Dense(4)])
    step_on_tensorflow(model, "graph")(X)
    assert helpers.to_numpy(model.layers[0].smallest) == np.float16(X.min())


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("mode", MODES)
def test_states_of_a_stateful_rnn_are_as_they_were(mode):
    tfmix.set_global_policy("mixed_float16")
    gru = layers.GRU(3, stateful=True)
    model = keras.Sequential([keras.Input((2, 4), 16), gru, layers.Dense(4)])
    step = step_on_tensorflow(model, mode)
    step(np.stack([X, X], 1))
    before = helpers.snapshot(gru.states)
    step(np.full((16, 2, 4), np.nan, "float32"))
    assert all(map(np.any, before))
    helpers.assert_unchanged(gru.states, before)
