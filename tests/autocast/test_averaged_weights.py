"""Averages of weights are trained in 16 bit, and swapped in float32 only."""

import keras
import numpy as np
import pytest

import tfmix

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def sgd():
    return keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5)


def low_memory():
    scaled = tfmix.optimizers.LowMemoryOptimizer(
        keras.optimizers.Adam(use_ema=True), seed=1
    )
    return tfmix.LossScaleOptimizer(scaled)


def compiled(policy, optimizer):
    keras.utils.set_random_seed(0)
    with tfmix.policy_scope(policy):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(1024),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(optimizer, "mse")
    return model


def fit(model, *callbacks):
    history = model.fit(
        *(X, Y),
        batch_size=4,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return history.history["loss"]


@pytest.mark.slow
def test_a_swap_of_float32_weights_changes_no_training():
    model = compiled("mixed_float16", low_memory())
    swapped = compiled("mixed_float16", low_memory())
    losses = fit(model)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    # TensorFlow swaps with sums of the two.
    np.testing.assert_allclose(fit(swapped, swap), losses, rtol=1e-4)
    pairs = zip(swapped.get_weights(), model.get_weights(), strict=True)
    for weight, average in pairs:
        np.testing.assert_allclose(weight, average, rtol=1e-2, atol=1e-4)


def test_a_swap_of_16_bit_weights_is_refused():
    model = compiled("float16", sgd())
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    with pytest.raises(ValueError, match="dtype 'float16'.*'mixed_' policy"):
        fit(model, swap)
