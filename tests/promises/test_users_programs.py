"""A compiled step of the user's holds arithmetic and nothing else.

So it can be cached, exported, saved, loaded without tfmix, and compiled for a
device that is not here.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

if helpers.ON_JAX:
    import jax
    from jax import export
else:
    import tensorflow as tf

POLICIES = ("mixed_float16", "mixed_bfloat16")
WRAPPERS = {
    "bare": lambda optimizer: optimizer,
    "wrapped": tfmix.LossScaleOptimizer,
}


def batches():
    """Returns batches, of which the third holds NaN."""
    random = np.random.default_rng(0)
    x = random.normal(size=(6, 4, 4)).astype("float32")
    y = x.sum(-1, keepdims=True)
    x[2, 0] = np.nan
    return list(zip(x, y, strict=True))


def network():
    keras.utils.set_random_seed(1)
    stack = [keras.Input((4,)), layers.Dense(8, "tanh")]
    stack += [layers.BatchNormalization(), layers.Dense(1, dtype="float32")]
    return keras.Sequential(stack)


def step_of_jax(policy, wrapper):
    """Returns a training step of the user's own, and its first state."""
    tfmix.set_global_policy(policy)
    model, optimizer = network(), WRAPPERS[wrapper](keras.optimizers.Adam(0.1))
    optimizer.build(model.trainable_variables)

    def loss_of(trained, others, x, y):
        found, others = model.stateless_call(trained, others, x, training=True)
        return ops.mean((found - y) ** 2), others

    def step(state, x, y):
        trained, others, slots = state
        (loss, others), slopes = jax.value_and_grad(loss_of, has_aux=True)(
            trained, others, x, y
        )
        trained, slots = optimizer.stateless_apply(slots, slopes, trained)
        return loss, (trained, others, slots)

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    return step, tuple([v.value for v in group] for group in groups)


def train(step, state):
    losses = []
    for x, y in batches():
        loss, state = step(state, x, y)
        losses.append(float(loss))
    return losses


@pytest.mark.costly
@helpers.requires_backend("jax")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_jitted_step_calls_no_host_and_can_be_exported(policy, wrapper):
    step, state = step_of_jax(policy, wrapper)
    x, y = batches()[0]
    jitted = jax.jit(step)
    program = jitted.lower(state, x, y).as_text()
    for word in ("callback", "stablehlo.case", "stablehlo.if"):
        assert word not in program
    saved = export.export(jitted)(state, x, y).serialize()
    losses = train(export.deserialize(saved).call, state)
    np.testing.assert_array_equal(losses, train(jitted, state))
    assert np.isnan(losses).tolist() == [False] * 2 + [True] + [False] * 3


class Competing(keras.Model):
    """Steps two optimizers of its own, one of them in a branch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = network(), network()
        self.one = keras.optimizers.Adam(0.1)
        self.two = keras.optimizers.SGD(0.1)

    def call(self, x, training=False):
        networks = self.first, self.second
        return sum(network(x, training=training) for network in networks)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2)

        def step(network, optimizer):
            weights = network.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

        step(self.first, self.one)
        tf.cond(
            tf.size(x) > 0, lambda: step(self.second, self.two), lambda: None
        )
        return {"loss": loss}


class OnDevice(tf.Module if not helpers.ON_JAX else object):
    """Trains where it is loaded, as TensorFlow's guide does on a phone."""

    def __init__(self, wrapper):
        super().__init__()
        self.model = Competing() if wrapper == "own step" else network()
        self.model.build((None, 4))
        self.model.compile("adam", "mse")
        if wrapper in WRAPPERS:
            self.optimizer = WRAPPERS[wrapper](keras.optimizers.Adam(0.1))
            self.optimizer.build(self.model.trainable_variables)

    def step(self, x, y):
        if isinstance(self.model, Competing):
            return self.model.train_step((x, y))
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = ops.mean((self.model(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def save(policy, wrapper, folder):
    """Saves a training step; returns the losses of this process."""
    tfmix.set_global_policy(policy)
    module = OnDevice(wrapper)
    given = [tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))]
    step = tf.function(module.step, input_signature=given)
    module.train = step
    tf.saved_model.save(module, folder, signatures={"train": step})
    return [float(step(*batch)["loss"]) for batch in batches()]


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "own step"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_saved_step_trains_as_it_did(tmp_path, policy, wrapper):
    losses = save(policy, wrapper, str(tmp_path))
    assert np.isnan(losses).tolist() == [False] * 2 + [True] + [False] * 3
    train = tf.saved_model.load(str(tmp_path)).signatures["train"]
    for (x, y), loss in zip(batches(), losses, strict=True):
        found = train(x=tf.constant(x), y=tf.constant(y))["loss"]
        np.testing.assert_array_equal(float(found), loss)
    # A function on the host would not be there in another process.
    assert "PyFunc" not in str(train.graph.as_graph_def())


@helpers.requires_backend("tensorflow")
def test_a_checkpoint_holds_what_keras_puts_into_it(tmp_path):
    found = {}
    for policy in ("float32", "mixed_float16"):
        tfmix.set_global_policy(policy)
        optimizer = keras.optimizers.Adam()
        weight = keras.Variable(np.ones(3, "float32"))
        optimizer.apply([np.ones(3, "float32")], [weight])
        checkpoint = tf.train.Checkpoint(optimizer=optimizer)
        path = checkpoint.save(str(tmp_path / policy))
        found[policy] = [name for name, _ in tf.train.list_variables(path)]
    assert found["mixed_float16"] == found["float32"]
