"""Keras's callbacks decide on epochs that were measured, and on no others."""

import keras
import numpy as np
import pytest

import tfmix

X = np.ones((4, 3), "float32")
Y = np.ones((4, 1), "float32")


def fitted(bad, callback):
    """Trains epochs of one batch each, of which some hold NaN."""

    def batches():
        for epoch in range(5):
            yield (X * np.nan if epoch in bad else X), Y

    keras.utils.set_random_seed(0)
    with tfmix.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, dtype="float32")]
        )
        model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    history = model.fit(
        batches(),
        steps_per_epoch=1,
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
    )
    return history.history


@pytest.mark.costly
@pytest.mark.parametrize("bad", [0, 2])
def test_the_best_epoch_is_one_that_was_measured(bad, tmp_path):
    stop = keras.callbacks.EarlyStopping("loss", patience=1)
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "{loss:.3f}.weights.h5", "loss", save_best_only=True
    )
    best.save_weights_only = True
    losses = fitted([bad], stop)["loss"]
    assert np.isnan(losses[bad])
    assert len(losses) == 5
    assert stop.best == losses[-1]
    fitted([bad], best)
    assert best.best == losses[-1]
    assert not any("nan" in path.name for path in tmp_path.iterdir())


@pytest.mark.costly
def test_a_skipped_epoch_is_no_plateau():
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
    rates = fitted([0, 2], plateau)["learning_rate"]
    assert len(rates) == 5
    assert min(rates) == max(rates)
