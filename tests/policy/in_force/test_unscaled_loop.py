"""An optimizer that scales no loss says so at its first step in float16."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers

X = np.ones((4, 3), "float32")


@pytest.fixture
def told(monkeypatch):
    found = []
    monkeypatch.setattr(
        "absl.logging.warning", lambda text, *args: found.append(text % args)
    )
    return lambda: [text for text in found if "not scaled" in text]


def step(optimizer):
    weight = keras.Variable(X)
    for _ in range(2):
        gradient = optimizer.scale_loss(keras.ops.convert_to_tensor(X))
        optimizer.apply([gradient], [weight])


def test_a_bare_optimizer_tells_once_and_names_two_lines(told):
    tfmix.set_global_policy("mixed_float16")
    step(keras.optimizers.Adam())
    (text,) = told()
    assert "optimizer = tfmix.LossScaleOptimizer(optimizer)" in text
    assert "loss = optimizer.scale_loss(loss)" in text


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "O3"])
def test_nothing_is_told_where_nothing_is_to_be_scaled(policy, told):
    tfmix.set_global_policy(policy)
    step(keras.optimizers.Adam())
    assert told() == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: tfmix.LossScaleOptimizer(keras.optimizers.SGD()),
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            # Outside of a compiled step JAX cannot run Keras's own.
            marks=helpers.requires_backend("tensorflow"),
        ),
        lambda: keras.optimizers.SGD(loss_scale_factor=128.0),
    ],
)
def test_an_optimizer_that_scales_tells_nothing(make, told):
    tfmix.set_global_policy("mixed_float16")
    step(make())
    assert told() == []


def test_a_compiled_model_tells_nothing(told):
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, X[:, :1], verbose=0)
    assert told() == []
