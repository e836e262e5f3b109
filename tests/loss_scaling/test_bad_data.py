"""Bad data skips a step and moves no scale; an overflow inside does."""

import keras
import numpy as np
import pytest

import tfmix

RNG = np.random.default_rng(0)


def trained(kernel, x, epochs=1):
    """Fits a float16 model with the given first kernel."""
    tfmix.set_global_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, use_bias=False),
            keras.layers.Dense(4, use_bias=False),
            keras.layers.Dense(4, use_bias=False),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    for layer in model.layers[:3]:
        layer.kernel.assign(kernel)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(x, np.ones((len(x), 1)), batch_size=4, epochs=epochs, verbose=0)
    return model.optimizer


@pytest.mark.costly
def test_a_row_of_nan_in_each_epoch_moves_nothing():
    x = RNG.normal(size=(16, 4)).astype("float32")
    x[3, 1] = np.nan
    optimizer = trained(np.eye(4), x, epochs=20)
    assert optimizer.skipped_steps == 20
    assert optimizer.loss_scale == 2.0**15


@pytest.mark.costly
def test_a_target_of_infinity_moves_nothing():
    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    y = np.ones((8, 1), "float32")
    y[0] = np.inf
    model.fit(np.ones((8, 4)), y, batch_size=4, shuffle=False, verbose=0)
    assert model.optimizer.skipped_steps == 1
    assert model.optimizer.loss_scale == 2.0**15


@pytest.mark.costly
def test_an_overflow_inside_lowers_the_loss_scale():
    # Small numbers go forward; gradients grow by 60,000 in each layer.
    x = np.full((8, 4), 1e-6, "float32")
    kernel = np.full((4, 4), 3e4)
    kernel[:, 1::2] *= -1
    optimizer = trained(kernel * np.eye(4), x * 0)
    assert optimizer.skipped_steps == 2
    assert optimizer.loss_scale == 2.0**13
