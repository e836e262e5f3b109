"""A loss that nobody scales: the first step in float16 says so."""

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


def compiled():
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    return model


def saved_and_loaded(path):
    compiled().save(path)
    return keras.saving.load_model(path)


# No file keeps a guard.
@pytest.mark.filterwarnings("ignore:The model was guarded")
@pytest.mark.parametrize("loaded", [False, True])
def test_a_step_without_a_scaled_loss_is_whole(loaded, told, tmp_path):
    # As a `train_step` does that was written for float32.
    model = saved_and_loaded(tmp_path / "m.keras") if loaded else compiled()
    optimizer, weights = model.optimizer, model.trainable_variables
    before = model.get_weights()
    for _ in range(2):
        gradients = [keras.ops.ones(one.shape) for one in weights]
        optimizer.apply(gradients, weights)
    for one, start in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, start - 1 - 1)
    (text,) = told()
    assert "loss = self.optimizer.scale_loss(loss)" in text


@helpers.requires_backend("jax")
def test_a_stateless_step_without_a_scaled_loss_is_whole(told):
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    weights = [one.value for one in model.trainable_variables]
    slots = [one.value for one in model.optimizer.variables]
    gradients = [keras.ops.ones(one.shape) for one in weights]
    after, _ = model.optimizer.stateless_apply(slots, gradients, weights)
    for one, start in zip(after, weights, strict=True):
        np.testing.assert_array_equal(one, start - 1)
    assert len(told()) == 1
