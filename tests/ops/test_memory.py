"""What is noted on tensors lives no longer than the tensors are used."""

import gc
import weakref

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.ops import exact_values

LAYERS = 8


@pytest.fixture
def copies(monkeypatch):
    """Lists how many copies of weights are alive as each one is made."""
    references, alive = [], []
    make = exact_values.weight_copy

    def noting(weight, copy, *args):
        references.extend(map(weakref.ref, (weight, copy)))
        alive.append(sum(made() is not None for made in references))
        return make(weight, copy, *args)

    monkeypatch.setattr(exact_values, "weight_copy", noting)
    # A cycle would hold them until Python looks for cycles.
    gc.collect()
    gc.disable()
    yield lambda: sum(made() is not None for made in references), alive
    gc.enable()


def network():
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((16,))])
    for _ in range(LAYERS):
        model.add(keras.layers.Dense(16, activation="relu"))
    return model, keras.ops.convert_to_tensor(np.ones((4, 16), "float32"))


def test_a_call_holds_the_copies_of_a_layer_and_of_the_one_before(copies):
    model, x = network()
    model(x)
    held = [id(v.value) for v in model.weights] if helpers.ON_JAX else []
    now, alive = copies
    # JAX's variables are the float32 weights themselves.
    assert now() == len(held)
    assert max(alive) - len(held) <= 8 < 2 * LAYERS


def test_a_step_leaves_no_copy(copies):
    model, x = network()
    for _ in range(2):
        train(model, x)
    assert copies[0]() == 0


def train(model, x):
    if helpers.ON_JAX:
        import jax

        def loss(weights):
            return keras.ops.sum(model.stateless_call(weights, [], x)[0])

        return jax.grad(loss)([v.value for v in model.weights])
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = keras.ops.sum(model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)
