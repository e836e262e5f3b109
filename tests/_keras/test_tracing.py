"""Optimizer state is created while TensorFlow traces a train step."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tests.optimizers import sixteen_bit

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
    helpers.quick_are({"masters"}, sixteen_bit.WAYS),
)
@pytest.mark.parametrize(
    ("inputs", "jit"), [(True, True), (True, False), (False, JAX_COMPILES)]
)
def test_fit_builds_the_optimizer_of_a_partly_16_bit_model(way, inputs, jit):
    assert learns(mixed_model(way, inputs, jit_compile=jit))
