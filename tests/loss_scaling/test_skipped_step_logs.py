"""A step reports its metrics, without any skipped step."""

import keras
import numpy as np
import pytest
from keras import ops

from tests import grid, helpers
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


def own_step_on_tensorflow():
    import tensorflow as tf

    class Own(keras.Model):
        """Reports each batch's own loss, under its own name."""

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                scaled = self.optimizer.scale_loss(loss)
            grads = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
            return {"own": loss, "loss": self.metrics[0].result()}

    return Own


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@EACH_MODE
def test_the_users_own_loss_is_left_alone(mode):
    own = own_step_on_tensorflow()
    _, logs = fit(make(own, **MODES[mode]), batches(4, [1]))
    arrays = without(batches(4), [1])
    _, expected = fit(make(own, **MODES[mode]), arrays)
    running = [expected[0]["own"]]
    for n, log in enumerate(expected[1:], 2):
        running.append(running[-1] + (log["own"] - running[-1]) / n)
    for ours, theirs, mean in zip(
        [logs[0], *logs[2:]], expected, running, strict=True
    ):
        helpers.assert_close(ours["own"], theirs["own"], "float32")
        helpers.assert_close(ours["loss"], mean, "float32")
    assert np.isnan(logs[1]["own"])
    helpers.assert_close(logs[1]["loss"], running[0], "float32")


@pytest.mark.costly
@EACH_MODE
@pytest.mark.parametrize("bad", [[0], [0, 1], [2]])
def test_a_metric_that_starts_high_is_as_without_the_bad_batch(bad, mode):
    model = make(metrics=[grid.Lowest()], **MODES[mode])
    history, logs = fit(model, batches(4, bad), epochs=2)
    oracle = make(metrics=[grid.Lowest()], **MODES[mode])
    expected, _ = fit(oracle, without(batches(4), bad), epochs=2)
    for key in ("loss", "lowest"):
        helpers.assert_close(history[key], expected[key], "float32")
        assert np.isnan(logs[0][key]) == (0 in bad)


class Nested(keras.Model):
    def get_metrics_result(self):
        found = super().get_metrics_result()
        return {"train": {"loss": found["loss"], "twice": 2 * found["loss"]}}


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
@pytest.mark.parametrize("kind", [Nested, FirstWithoutVariables])
def test_a_models_own_logs_are_kept(kind, mode):
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


@pytest.mark.costly
@EACH_MODE
def test_without_a_bad_step_the_logs_are_those_of_an_unguarded_model(mode):
    guarded = make(metrics=["mae", grid.Lowest()], **MODES[mode])
    found, logs = fit(guarded, batches(4), epochs=2)
    keras.utils.set_random_seed(1)
    oracle = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)]
    )
    oracle.compile(
        keras.optimizers.SGD(0.01),
        loss="mse",
        metrics=["mae", grid.Lowest()],
        **MODES[mode],
    )
    expected, oracle_logs = fit(oracle, batches(4), epochs=2)
    assert logs == oracle_logs
    assert found == expected


@pytest.mark.slow
@helpers.requires_backend("tensorflow")
def test_each_replica_knows_its_metrics_results():
    class Adds(keras.Model):
        def train_step(self, data):
            return {**super().train_step(data), "answer": ops.ones(())}

    found = []
    for bad in ([2], []):
        with helpers.mirrored_strategy().scope():
            model = make(Adds, jit_compile=False)
        arrays = batches(3, bad) if bad else without(batches(3), [2])
        found.append(fit(model, arrays)[0])
    # Other keys than the metrics' are those of the last step.
    helpers.assert_close(*[history["loss"] for history in found], "float32")
    assert all("result" not in vars(metric) for metric in model.metrics)
