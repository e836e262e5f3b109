"""No step is lost in search of a scale: the first gradients are finite."""

import keras
import numpy as np
import pytest

import tfmix


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
