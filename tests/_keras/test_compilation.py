"""Optimizer state is created while TensorFlow traces a train step."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers, sixteen_bit

# JAX would not trace `fit` without, which also builds a model without inputs.
JAX_COMPILES = keras.backend.backend() == "jax"


def mixed_model(way, inputs=True, **settings):
    """Returns bfloat16 layers below a float32 head, optimizer not built."""
    keras.utils.set_random_seed(1)
    start = [keras.Input((4,), dtype="float32")] if inputs else []
    model = keras.Sequential(
        [
            *start,
            keras.layers.Dense(8, dtype="bfloat16"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    inner = sixteen_bit.WAYS[way](keras.optimizers.SGD(0.05))
    optimizer = tfmix.LossScaleOptimizer(inner, 4.0)
    model.compile(optimizer, loss="mse", **settings)
    return model


def learns(model):
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = x[:, :1]
    losses = model.fit(x, y, epochs=4, verbose=0).history["loss"]
    return losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    "way",
    helpers.quick_are({"masters", "flat"}, sixteen_bit.WAYS),
)
@pytest.mark.parametrize(
    ("inputs", "jit"), [(True, True), (True, False), (False, JAX_COMPILES)]
)
def test_fit_builds_the_optimizer_of_a_partly_16_bit_model(way, inputs, jit):
    assert learns(mixed_model(way, inputs, jit_compile=jit))


class Counts(keras.layers.Layer):
    calls = 0

    def call(self, x):
        type(self).calls += 1
        return x


@pytest.mark.parametrize("settings", [{}, {"auto_scale_loss": False}])
@pytest.mark.parametrize("jit", [True, False])
@helpers.requires_backend("tensorflow")
def test_a_step_is_traced_once_though_it_builds_the_optimizer(jit, settings):
    with tfmix.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [keras.Input((4,)), Counts(), keras.layers.Dense(1)]
        )
    model.compile("adam", "mse", jit_compile=jit, **settings)
    before = Counts.calls
    model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
    assert Counts.calls == before + 1
    assert len(model.optimizer.variables) > 2
