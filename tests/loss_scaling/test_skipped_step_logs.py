"""A step reports its metrics, without any skipped step.

`tests/grid.py` compares metrics, callbacks and steps of your own with plain
Keras; here is what the grid leaves out.
"""

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers
from tfmix.loss_scaling import optimizer as optimizers
from tfmix.loss_scaling import rules
from tfmix.loss_scaling import train_step_guard as guards

MODES = {
    "tensorflow": {
        "eager": {"run_eagerly": True},
        "graph": {"jit_compile": False},
        "xla": {"jit_compile": True},
    },
    "jax": {"eager": {"run_eagerly": True}, "xla": {"jit_compile": True}},
}[keras.backend.backend()]
EACH_MODE = pytest.mark.parametrize("mode", MODES)


def batches(count, bad=()):
    """Returns inputs and targets, with NaN in some batches of four."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4 * count, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True) + 5.0
    for batch in bad:
        y[4 * batch : 4 * batch + 4] = np.nan
    return x, y


def without(arrays, bad):
    kept = np.ones(len(arrays[0]), bool)
    for batch in bad:
        kept[4 * batch : 4 * batch + 4] = False
    return [array[kept] for array in arrays]


def make(kind=keras.Sequential, metrics=(), **compile_arguments):
    keras.utils.set_random_seed(1)
    dense = [keras.layers.Dense(4), keras.layers.Dense(1)]
    if kind is keras.Sequential:
        model = kind([keras.Input((3,)), *dense])
    else:
        inputs = x = keras.Input((3,))
        for layer in dense:
            x = layer(x)
        model = kind(inputs, x)
    optimizer = optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), loss_scale=rules.NoLossScale()
    )
    model.compile(
        optimizer, loss="mse", metrics=[*metrics] or None, **compile_arguments
    )
    return guards.guard(model)


class Told(keras.callbacks.Callback):
    """Keeps each batch's logs."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append(dict(logs))


def fit(model, arrays, **arguments):
    told = Told()
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0} | arguments
    given = arguments.pop("callbacks", [])
    history = model.fit(*arrays, callbacks=[told, *given], **arguments)
    return history.history, told.logs


def epochs(model, *bad_epochs, count=4, **arguments):
    """Trains epochs of one batch, NaN in some; returns the losses."""
    history = []
    for epoch in range(count):
        arrays = batches(1, [0] if epoch in bad_epochs else [])
        logs, _ = fit(model, arrays, initial_epoch=epoch, epochs=epoch + 1)
        history.append(logs["loss"][0])
    return history


@pytest.mark.costly
@EACH_MODE
def test_an_epoch_without_a_finite_batch_has_no_loss(mode):
    losses = epochs(make(metrics=["mae"], **MODES[mode]), 1)
    assert np.isnan(losses[1])
    expected = epochs(make(metrics=["mae"], **MODES[mode]), count=3)
    helpers.assert_close([losses[0], *losses[2:]], expected, "float32")


@pytest.mark.costly
@EACH_MODE
def test_a_batch_of_nan_trains_and_reports_nothing(mode):
    model = make(metrics=["mae"], **MODES[mode])
    before = helpers.snapshot(model.trainable_variables)
    assert np.all(np.isnan(model.train_on_batch(*batches(1, [0]))))
    helpers.assert_unchanged(model.trainable_variables, before)
    assert np.all(np.isfinite(model.train_on_batch(*batches(1))))


@pytest.mark.costly
def test_an_epoch_that_was_not_measured_is_not_the_best(tmp_path):
    class Batches(keras.utils.PyDataset):
        epoch = 0

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return batches(1, [0] if self.epoch == 3 else [])

        def on_epoch_end(self):
            self.epoch += 1

    model = make()
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
    history = model.fit(Batches(), epochs=6, verbose=0, callbacks=calls).history
    assert np.sum(np.isnan(history["loss"])) == 1
    assert len(history["loss"]) == 6
    assert best.best == np.nanmin(history["loss"]) == history["loss"][-1]
    assert history["learning_rate"][-1] == np.float32(0.01)


@pytest.mark.costly
@EACH_MODE
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_terminate_on_nan_stops_only_where_nothing_was_measured(bad, mode):
    model = make(**MODES[mode])
    stop = keras.callbacks.TerminateOnNaN()
    history, logs = fit(model, batches(4, [bad]), callbacks=[stop], epochs=2)
    assert len(history["loss"]) == (1 if bad == 0 else 2)
    assert np.isnan(logs[0]["loss"]) == (bad == 0)


class NoVariables(keras.metrics.Metric):
    """Has a result, and no variables."""

    def update_state(self, *args, **kwargs):
        pass

    def result(self):
        return ops.convert_to_tensor(7.0)


class FirstWithoutVariables(keras.Model):
    @property
    def metrics(self):
        # It is always the same object, as if Keras held it.
        if "_seventh" not in vars(self):
            object.__setattr__(self, "_seventh", NoVariables(name="seven"))
        return [vars(self)["_seventh"], *super().metrics]


@pytest.mark.costly
@EACH_MODE
def test_a_metric_without_variables_is_kept(mode):
    kind = FirstWithoutVariables
    history, _ = fit(make(kind, **MODES[mode]), batches(4, [0, 3]))
    oracle = make(kind, **MODES[mode])
    expected, _ = fit(oracle, without(batches(4), [0, 3]))
    assert set(history) == set(expected)
    for key, values in expected.items():
        helpers.assert_close(history[key], values, "float32")


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@EACH_MODE
def test_a_first_step_that_builds_the_model_leaves_no_trace(mode):
    def unbuilt():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        optimizer = optimizers.LossScaleOptimizer("sgd", loss_scale=1.0)
        model.compile(optimizer, loss="mse", metrics=["mae"], **MODES[mode])
        return guards.guard(model)

    model, oracle = unbuilt(), unbuilt()
    x, y = batches(3)
    x[0] = np.nan
    fit(model, (x, y))
    fit(oracle, without((x, y), [0]))
    for ours, theirs in zip(model.weights, oracle.weights, strict=True):
        helpers.assert_close(ours, theirs, "float32")
