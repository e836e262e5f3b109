"""Under JAX, a model's first use traces little beside Keras's."""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers
from tfmix._keras import replacing

pytestmark = helpers.requires_backend("jax")

if keras.backend.backend() == "jax":
    import jax

X = np.zeros((8, 4), "float32")
Y = X[:, :1]


def by_keras(policy):
    replacing.want(replacing.COMPILE, False)
    keras.mixed_precision.set_dtype_policy(policy)


def compiled(count):
    """Returns a model of some layers, whose optimizer has its state."""
    hidden = [layers.Dense(4, "relu") for _ in range(count)]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def sizes(count):
    """Returns the equations of a train step, and its operations for XLA."""
    model = compiled(count)
    model._symbolic_build(data_batch=(X, Y))
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    traced = jax.jit(lambda *given: model.train_step(*given)).trace(
        state, (X, Y)
    )
    printed = str(traced.jaxpr), traced.lower().as_text()
    return [printed[0].count(" = "), printed[1].count("stablehlo.")]


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_layer_adds_few_equations_to_a_step(policy):
    found = []
    for set_policy in (by_keras, tfmix.set_global_policy):
        set_policy(policy)
        found.append(np.subtract(sizes(14), sizes(4)))
    theirs, ours = found
    # The check of gradients is written so that it is one kernel on a GPU.
    # A product of each weight gradient has a form for each platform.
    assert np.all(ours <= [1.15, 1.2] * theirs)
