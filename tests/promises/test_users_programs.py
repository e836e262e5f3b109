"""A compiled step of the user's holds arithmetic and nothing else.

So it can be cached, exported, saved, loaded without tfmix, and compiled for a
device that is not here.
"""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers, loops

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


def loop_of(policy, wrapper, mode):
    tfmix.set_global_policy(policy)
    optimizer = WRAPPERS[wrapper](keras.optimizers.Adam(0.1))
    return loops.Loop(network(), optimizer, mode)


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
    loop = loop_of(policy, wrapper, "jit")
    state = tuple([v.value for v in group] for group in loop.groups())
    x, y = batches()[0]
    jitted = jax.jit(lambda state, x, y: loop.by_jax(*state, x, y))
    # What the platform decides is decided once this is compiled.
    program = jitted.lower(state, x, y).compile().as_text()
    for word in ("callback", " conditional("):
        assert word not in program
    saved = export.export(jitted)(state, x, y).serialize()
    losses = train(export.deserialize(saved).call, state)
    np.testing.assert_array_equal(losses, train(jitted, state))
    assert np.isnan(losses).tolist() == [False] * 2 + [True] + [False] * 3


def save(policy, wrapper, folder):
    """Saves a training step; returns the losses of this process."""
    module, loop = tf.Module(), loop_of(policy, wrapper, "graph")
    module.model, module.optimizer = loop.model, loop.optimizer
    given = [tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))]

    # It trains where it is loaded, as TensorFlow's guide does on a phone.
    @tf.function(input_signature=given)
    def step(x, y):
        return {"loss": loop.by_tensorflow(x, y)}

    module.train = step
    tf.saved_model.save(module, folder, signatures={"train": step})
    return [float(step(*batch)["loss"]) for batch in batches()]


# It takes five seconds to save; `loss_scaling/test_compiled.py` compiles a
# step for XLA, which has no function on the host.
@pytest.mark.slow
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("wrapper", WRAPPERS)
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
