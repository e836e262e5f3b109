"""One infinite pixel changes nothing, whoever wrote the loop.

The optimizers are not wrapped, and no loss is scaled by hand. Training steps
of `fit` are in `tests/step/test_ways_to_train.py`.
"""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

if helpers.ON_JAX:
    import jax
else:
    import tensorflow as tf

X = np.random.default_rng(0).random((16, 12)).astype("float32")
NOISE = np.random.default_rng(1).normal(size=(16, 4)).astype("float32")


def bad(x):
    """Returns a batch in which one pixel of the first picture is infinite."""
    x = np.array(x)
    x[(0,) * x.ndim] = np.inf
    return x


def network(inputs, outputs):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(16, "relu"),
            layers.Dense(outputs),
        ]
    )


# Each function returns the models of a loop, and the loss of each. A loss takes
# a function that calls a model, and a batch.


def autoencoder():
    def loss(call, x):
        return ops.mean(ops.square(call(0, x) - x))

    return [network(12, 12)], [loss]


def wgan_gp():
    def of_critic(call, x):
        made = call(1, NOISE[: len(x)])
        between = 0.5 * (x + made)
        norm = ops.norm(slope(lambda x: ops.sum(call(0, x)), between), axis=-1)
        wanted = ops.mean(call(0, made)) - ops.mean(call(0, x))
        return wanted + 10.0 * ops.mean(ops.square(norm - 1.0))

    def of_generator(call, x):
        return -ops.mean(call(0, call(1, NOISE)))

    return [network(12, 1), network(4, 12)], [of_critic, of_generator]


# The first loss of each is one of the batch.
KINDS = (autoencoder, wgan_gp)


def slope(function, x):
    if helpers.ON_JAX:
        return jax.grad(function)(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = function(x)
    return tape.gradient(value, x)


class Loop:
    """Trains one kind in a loop without `fit`."""

    def __init__(self, kind):
        self.models, self.losses = kind()
        self.optimizers = []
        for model in self.models:
            adam = keras.optimizers.Adam(0.01, use_ema=True)
            adam.build(model.trainable_variables)
            self.optimizers.append(adam)

    def state(self):
        """Returns the numbers of each model and its optimizer."""
        return [
            helpers.snapshot([*model.trainable_variables, *optimizer.variables])
            for model, optimizer in zip(
                self.models, self.optimizers, strict=True
            )
        ]


class TensorFlowLoop(Loop):
    def __init__(self, kind, mode):
        super().__init__(kind)
        if mode == "eager":
            self.step = lambda x: self.once(tf.constant(x))
        else:
            self.step = tf.function(self.once, jit_compile=mode == "jit")

    def call(self, index, x):
        return self.models[index](x, training=True)

    def once(self, x):
        parts = zip(self.models, self.losses, self.optimizers, strict=True)
        for model, loss, optimizer in parts:
            weights = model.trainable_variables
            with tf.GradientTape() as tape:
                value = loss(self.call, x)
            optimizer.apply(tape.gradient(value, weights), weights)


class ReplicatedLoop(TensorFlowLoop):
    """Each of two replicas gets half of the batch, so that one is bad."""

    def __init__(self, kind):
        self.strategy = helpers.mirrored_strategy()
        with self.strategy.scope():
            super().__init__(kind, "graph")
        self.step = tf.function(self.on_replicas)

    def on_replicas(self, x):
        def on_replica():
            context = tf.distribute.get_replica_context()
            halves = tf.reshape(x, (2, 8, 12))
            self.once(halves[context.replica_id_in_sync_group])

        self.strategy.run(on_replica)


class JaxLoop(Loop):
    def __init__(self, kind, mode):
        super().__init__(kind)
        self.compiled = jax.jit(self.once) if mode == "jit" else self.once

    def once(self, weights, slots, x):
        weights, slots = list(weights), list(slots)
        for n, loss in enumerate(self.losses):

            def loss_of(chosen, n=n, loss=loss):
                def call(index, x):
                    values = chosen if index == n else weights[index]
                    model = self.models[index]
                    return model.stateless_call(values, [], x)[0]

                return loss(call, x)

            weights[n], slots[n] = self.optimizers[n].stateless_apply(
                slots[n], jax.grad(loss_of)(weights[n]), weights[n]
            )
        return weights, slots

    def step(self, x):
        used = [m.trainable_variables for m in self.models]
        kept = [o.variables for o in self.optimizers]
        values = [[[v.value for v in vs] for vs in s] for s in (used, kept)]
        after = self.compiled(*values, jax.numpy.asarray(x))
        for variables, new in zip([*used, *kept], sum(after, []), strict=True):
            for variable, value in zip(variables, new, strict=True):
                variable.assign(value)


def loop_of(kind, mode):
    if helpers.ON_JAX:
        return JaxLoop(kind, mode)
    return ReplicatedLoop(kind) if mode == "2" else TensorFlowLoop(kind, mode)


MODES = ["jit", "eager"] if helpers.ON_JAX else ["graph", "jit", "eager", "2"]
QUICK = {(autoencoder, "graph"), (autoencoder, "jit")}
if not helpers.ON_JAX:
    QUICK |= {(wgan_gp, "eager")}


def assert_finite(state):
    assert all(np.isfinite(one).all() for part in state for one in part)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "mode"), helpers.quick_are(QUICK, itertools.product(KINDS, MODES))
)
def test_a_free_loop_leaves_all_as_it_was(kind, mode):
    tfmix.set_global_policy("mixed_float16")
    loop = loop_of(kind, mode)
    loop.step(X)
    before = loop.state()
    loop.step(bad(X))
    after = loop.state()
    for one, start in zip(after[0], before[0], strict=True):
        np.testing.assert_array_equal(one, start)
    assert_finite(after)
    loop.step(X)
    for moved, start in zip(loop.state(), after, strict=True):
        weights = [*zip(moved, start, strict=True)]
        assert not any(np.array_equal(a, b) for a, b in weights[:2])
    assert_finite(loop.state())


@pytest.mark.costly
@pytest.mark.parametrize("mode", MODES[:1])
def test_float32_does_not_recover(mode):
    loop = loop_of(autoencoder, mode)
    loop.step(bad(X))
    loop.step(X)
    with pytest.raises(AssertionError):
        assert_finite(loop.state())
