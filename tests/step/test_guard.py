"""What a guarded train step keeps and reports when it is skipped.

`test_ways_to_train.py` has bad batches in every way to train; here is what an
epoch reports, and what callbacks decide by it.
"""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers, steps
from tfmix.loss_scaling import optimizer as optimizers
from tfmix.loss_scaling import rules
from tfmix.step import guard as guards

NO_SCALE = rules.NoLossScale()
EACH_MODE = pytest.mark.parametrize("mode", steps.MODES)


def data(count=4, bad=()):
    """Returns inputs and targets, with NaN in some batches of four rows."""
    x = np.random.default_rng(0).normal(size=(4 * count, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True) + 5.0
    x.reshape(count, 4, 3)[list(bad)] = np.nan
    return x, y


def compiled(model, mode=None, rule=NO_SCALE):
    optimizer = keras.optimizers.SGD(0.01)
    wrapped = optimizers.LossScaleOptimizer(optimizer, loss_scale=rule)
    how = steps.settings(mode) if mode else {}
    model.compile(wrapped, loss="mse", metrics=["mae"], **how)
    return model


def graph(*hidden, kind=keras.Model):
    keras.utils.set_random_seed(1)
    inputs = y = keras.Input((3,))
    for layer in [*hidden, layers.Dense(1)]:
        y = layer(y)
    return kind(inputs, y)


def guarded(*hidden, mode=None, **settings):
    return guards.guard(compiled(graph(*hidden, **settings), mode))


def fit(model, arrays, **settings):
    settings = {"batch_size": 4, "shuffle": False, "verbose": 0} | settings
    return model.fit(*arrays, **settings).history


@pytest.mark.costly
@EACH_MODE
def test_an_epoch_without_a_finite_batch_reports_nothing(mode):
    model, oracle = guarded(mode=mode), guarded(mode=mode)
    good, bad = data(1), data(1, bad=[0])
    found = [fit(model, each) for each in (good, bad, good)]
    expected = [fit(oracle, good) for _ in range(2)]
    for key in ("loss", "mae"):
        kept, lost, later = (each[key] for each in found)
        assert np.isnan(lost)
        wanted = [each[key] for each in expected]
        helpers.assert_close([kept, later], wanted, "float32")
    before = helpers.snapshot(model.trainable_variables)
    assert np.all(np.isnan(model.train_on_batch(*bad)))
    helpers.assert_unchanged(model.trainable_variables, before)
    assert np.all(np.isfinite(model.train_on_batch(*good)))


@pytest.mark.costly
@EACH_MODE
def test_an_epoch_without_an_applied_step_does_not_report_a_loss_of_zero(mode):
    # The loss is finite, but not the gradients: the scale is far too high.
    rule = rules.DynamicLossScale(2.0**100, max_scale=2.0**100)
    model = guards.guard(compiled(graph(), mode, rule))
    x, y = data()
    history = fit(model, (x, y * 1e10))
    assert model.optimizer.skipped_steps == 4
    assert 1e19 < history["loss"][0] < 1e22
    assert history["mae"][0] > 1.0


@pytest.mark.costly
def test_an_epoch_that_was_not_measured_is_not_the_best(tmp_path):
    epochs = (data(1, bad=[0] if epoch == 3 else []) for epoch in range(6))
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="loss", save_best_only=True
    )
    calls = [
        best,
        keras.callbacks.ReduceLROnPlateau("loss", patience=2),
        keras.callbacks.EarlyStopping(
            "loss", patience=3, restore_best_weights=True
        ),
    ]
    settings = {"batch_size": None, "steps_per_epoch": 1, "epochs": 6}
    history = fit(guarded(), [epochs], callbacks=calls, **settings)
    assert np.isnan(history["loss"]).tolist() == [n == 3 for n in range(6)]
    assert best.best == np.nanmin(history["loss"]) == history["loss"][-1]
    assert history["learning_rate"][-1] == np.float32(0.01)


@pytest.mark.costly
def test_guarding_twice_and_compiling_again_change_nothing():
    model = compiled(graph(layers.BatchNormalization()))
    fit(model, data())
    assert not helpers.is_guarded(model)
    assert guards.guard(guards.guard(model)) is model
    assert helpers.is_guarded(model)
    fit(model, data(bad=[1]))
    model.compile(optimizers.LossScaleOptimizer("sgd"), loss="mse")
    fit(model, data(bad=[1]))
    helpers.assert_all_finite(model.weights)
    # Without the guard, the same batch poisons the statistics.
    model = compiled(graph(layers.BatchNormalization()))
    fit(model, data(bad=[1]))
    with pytest.raises(AssertionError, match="not finite"):
        helpers.assert_all_finite(model.weights)


@pytest.mark.costly
def test_a_guarded_model_is_saved_and_loaded_like_any_other(tmp_path):
    model, (x, y) = guarded(layers.BatchNormalization()), data()
    fit(model, (x, y))
    model.save(tmp_path / "model.keras")
    # It also loads where tfmix is switched off.
    tfmix.set_global_policy("float32")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    helpers.assert_same_bits(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )
    assert type(loaded.optimizer) is optimizers.LossScaleOptimizer
    # A file does not say that a model was guarded.
    assert not helpers.is_guarded(loaded)
    fit(guards.guard(loaded), data(bad=[1]))
    helpers.assert_all_finite(loaded.weights)


def test_a_model_that_cannot_skip_is_refused_with_what_to_write():
    model, late = graph(), guarded()
    model.compile("adam", loss="mse")
    with pytest.raises(ValueError, match="tfmix.NoLossScale"):
        guards.guard(model)
    with pytest.raises(TypeError, match="model=3"):
        guards.guard(3)
    late.compile("adam", loss="mse")
    with pytest.raises(ValueError, match="can be guarded only if"):
        fit(late, data())


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@EACH_MODE
def test_seeds_move_on_in_a_skipped_step(mode):
    model = guarded(layers.Dropout(0.5), mode=mode)
    (seed,) = model.non_trainable_variables
    states = [helpers.to_numpy(seed).tolist()]
    for _ in range(2):
        model.train_on_batch(*data(1, bad=[0]))
        states.append(helpers.to_numpy(seed).tolist())
    assert model.optimizer.skipped_steps == 2
    assert len(set(map(tuple, states))) == 3
