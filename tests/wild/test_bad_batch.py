"""One infinite pixel changes nothing, whoever wrote the loop.

The optimizers are not wrapped, and no loss is scaled by hand. Training steps
of `fit` are in `tests/step/test_ways_to_train.py`.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

ON_JAX = keras.backend.backend() == "jax"
if ON_JAX:
    import jax
else:
    import tensorflow as tf

X = np.random.default_rng(0).random((16, 12)).astype("float32")
NOISE = np.random.default_rng(1).normal(size=(16, 4)).astype("float32")
LABELS = (np.arange(16) % 3).astype("int32")


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


# Each function returns what a loop trains: its models, and for each optimizer
# the models it steps and their loss. The loss takes a function that calls a
# model, and a batch.


def autoencoder():
    def loss(call, x):
        return ops.mean(ops.square(call(0, x) - x))

    return [network(12, 12)], [((0,), loss)]


def gan():
    def of_critic(call, x):
        made = ops.softplus(call(0, call(1, NOISE)))
        return ops.mean(made) + ops.mean(ops.softplus(-call(0, x)))

    def of_generator(call, x):
        return ops.mean(ops.softplus(-call(0, call(1, NOISE))))

    parts = [((0,), of_critic), ((1,), of_generator)]
    return [network(12, 1), network(4, 12)], parts


def wgan_gp():
    def of_critic(call, x):
        made = call(1, NOISE[: len(x)])
        between = 0.5 * (x + made)
        norm = ops.norm(slope(lambda x: ops.sum(call(0, x)), between), axis=-1)
        wanted = ops.mean(call(0, made)) - ops.mean(call(0, x))
        return wanted + 10.0 * ops.mean(ops.square(norm - 1.0))

    def of_generator(call, x):
        return -ops.mean(call(0, call(1, NOISE)))

    parts = [((0,), of_critic), ((1,), of_generator)]
    return [network(12, 1), network(4, 12)], parts


def simclr():
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(True)

    def contrastive(call, x):
        views = [call(1, call(0, view)) for view in (x, ops.roll(x, 1, 1))]
        one, two = (ops.normalize(view) for view in views)
        near = ops.matmul(one, ops.transpose(two)) / 0.1
        return cross_entropy(np.arange(len(x)), near)

    def probe(call, x):
        return cross_entropy(LABELS[: len(x)], call(2, call(0, x)))

    models = [network(12, 8), network(8, 8), network(8, 3)]
    return models, [((0, 1), contrastive), ((2,), probe)]


# Maps each kind to how many of its first optimizers have a loss of the batch.
KINDS = {autoencoder: 1, gan: 1, wgan_gp: 1, simclr: 2}


def slope(function, x):
    if ON_JAX:
        return jax.grad(function)(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = function(x)
    return tape.gradient(value, x)


class Loop:
    """Trains one kind in a loop without `fit`."""

    def __init__(self, kind):
        self.models, self.parts = kind()
        self.optimizers = []
        for indices, _ in self.parts:
            adam = keras.optimizers.Adam(0.01, use_ema=True)
            adam.build(self.weights_of(indices))
            self.optimizers.append(adam)

    def weights_of(self, indices):
        return [v for i in indices for v in self.models[i].trainable_variables]

    def state(self):
        """Returns the numbers of each part: weights, and its optimizer's."""
        found = []
        pairs = zip(self.parts, self.optimizers, strict=True)
        for (indices, _), optimizer in pairs:
            variables = [*self.weights_of(indices), *optimizer.variables]
            found.append([np.array(ops.convert_to_numpy(v)) for v in variables])
        return found


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
        pairs = zip(self.parts, self.optimizers, strict=True)
        for (indices, loss), optimizer in pairs:
            weights = self.weights_of(indices)
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
        for n, (indices, loss) in enumerate(self.parts):

            def loss_of(chosen, indices=indices, loss=loss):
                values = dict(enumerate(weights))
                values.update(zip(indices, chosen, strict=True))

                def call(index, x):
                    model = self.models[index]
                    return model.stateless_call(values[index], [], x)[0]

                return loss(call, x)

            chosen = [weights[i] for i in indices]
            grads = sum(jax.grad(loss_of)(chosen), [])
            new, slots[n] = self.optimizers[n].stateless_apply(
                slots[n], grads, sum(chosen, [])
            )
            new = iter(new)
            for i in indices:
                weights[i] = [next(new) for _ in weights[i]]
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
    if ON_JAX:
        return JaxLoop(kind, mode)
    return ReplicatedLoop(kind) if mode == "2" else TensorFlowLoop(kind, mode)


MODES = ["jit", "eager"] if ON_JAX else ["graph", "jit", "eager", "2"]
QUICK = {(autoencoder, "graph"), (autoencoder, "jit"), (wgan_gp, "eager")}


def cases():
    for kind in KINDS:
        for mode in MODES:
            quick = (kind, mode) in QUICK and not (ON_JAX and mode == "eager")
            yield pytest.param(
                kind,
                mode,
                marks=[] if quick else [pytest.mark.slow],
                id=f"{kind.__name__}-{mode}",
            )


def assert_finite(state):
    assert all(np.isfinite(one).all() for part in state for one in part)


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "mode"), list(cases()))
def test_a_free_loop_leaves_all_as_it_was(kind, mode):
    tfmix.set_global_policy("mixed_float16")
    loop = loop_of(kind, mode)
    loop.step(X)
    before = loop.state()
    loop.step(bad(X))
    after = loop.state()
    for part in range(KINDS[kind]):
        for one, start in zip(after[part], before[part], strict=True):
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
