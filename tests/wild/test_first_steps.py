"""No step is lost in search of a scale: the first gradients are finite."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers

APPLICATIONS = ("MobileNetV2", "ResNet50", "EfficientNetB0")
FACTORS = (1e-6, 1.0, 1e6)


def first_gradients(model, x, y):
    """Returns the gradients of a loss times each factor."""
    import tensorflow as tf

    loss_fn = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def gradients():
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled = [factor * loss for factor in FACTORS]
        weights = model.trainable_variables
        return [tape.gradient(each, weights) for each in scaled]

    return [[np.asarray(g) for g in each] for each in gradients()]


def direction(gradients):
    joined = np.concatenate([each.ravel() for each in gradients])
    return joined / np.linalg.norm(joined)


@pytest.mark.slow
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("name", APPLICATIONS)
def test_the_first_step_of_an_application_is_finite(name):
    tfmix.set_global_policy("mixed_float16")
    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=(32, 32, 3), classes=10)
    x = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype("float32")
    found = first_gradients(model, x, np.arange(8))
    for gradients in found:
        assert all(np.isfinite(each).all() for each in gradients)
    # None underflows either: they are those of factor 1, times the factor.
    one, middle, other = map(direction, found)
    assert one @ middle > 0.999
    assert other @ middle > 0.999


def regression(policy, targets):
    """Returns the last loss of `fit`, and the number of skipped steps."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    tfmix.set_global_policy(policy)
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    y = targets * (1.0 + 0.1 * x.sum(1, keepdims=True)).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(32, "relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    history = model.fit(x, y, batch_size=32, epochs=20, verbose=0)
    skipped = getattr(model.optimizer, "skipped_steps", 0)
    return history.history["loss"][-1], skipped


@pytest.mark.costly
@pytest.mark.parametrize("targets", [5e4, 5.0])
def test_a_regression_of_any_size_trains_from_its_first_step(targets):
    right, _ = regression("float32", targets)
    found, skipped = regression("mixed_float16", targets)
    assert skipped == 0
    assert abs(found - right) < 0.01 * right
