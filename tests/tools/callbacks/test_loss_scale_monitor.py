"""LossScaleMonitor shows the scale and the skips, and stops a stuck run."""

import csv

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.loss_scaling import errors, rules
from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.callbacks import loss_scale_monitor

Monitor = loss_scale_monitor.LossScaleMonitor


def compiled(*dtypes, optimizer=scaling.LossScaleOptimizer, **settings):
    layers = [keras.layers.Dense(1, dtype=dtype) for dtype in dtypes]
    layers = layers or [keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    if optimizer is scaling.LossScaleOptimizer:
        rule = settings.pop("loss_scale", rules.DynamicLossScale())
        optimizer = optimizer("sgd", loss_scale=rule)
    model.compile(optimizer, "mse", **settings)
    return model


def batches(count, bad=()):
    x = np.ones((count, 2), "float32")
    x[list(bad)] = np.inf
    return {"x": x, "y": np.zeros((count, 1), "float32"), "batch_size": 1}


def fit(model, monitor, data, **settings):
    settings = {"verbose": 0, "shuffle": False} | settings
    callbacks = [monitor, *settings.pop("callbacks", [])]
    return model.fit(**data, callbacks=callbacks, **settings).history


def test_the_history_and_the_csv_file_hold_scale_and_steps(tmp_path):
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    data = batches(6, bad=[1, 4])
    history = fit(compiled(), Monitor(), data, callbacks=[logger], epochs=2)
    expected = {
        "loss_scale": [2.0**13, 2.0**11],
        "skipped_steps": [2, 4],
        "applied_steps": [4, 8],
    }
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    for name, values in expected.items():
        assert history[name] == values
        assert [float(row[name]) for row in rows] == values


@pytest.mark.costly
@pytest.mark.parametrize(
    ("every", "steps"), [(1, range(6)), (2, [0, 2, 4, 5]), (9, [0, 5])]
)
def test_readings_of_the_scale_are_taken_every_n_steps_and_at_the_end(
    every, steps
):
    monitor = Monitor(every=every)
    fit(compiled(), monitor, batches(5, bad=[0, 2]))
    scales = [2.0**15, 2.0**14, 2.0**14, *[2.0**13] * 3]
    assert [(each.step, each.loss_scale) for each in monitor.timeline] == [
        (step, scales[step]) for step in steps
    ]


@pytest.mark.parametrize("several", [1, 3])
def test_steps_are_counted_over_epochs_and_over_calls_of_fit(several):
    monitor, model = Monitor(), compiled(steps_per_execution=several)
    fit(model, monitor, batches(3), epochs=2)
    fit(model, monitor, batches(6))
    assert [reading.step for reading in monitor.timeline] == [0, 3, 6, 12]


def test_between_readings_nothing_is_copied_to_the_host(monkeypatch):
    reads = []
    readable = scaling.LossScaleOptimizer.loss_scale.fget
    monkeypatch.setattr(
        scaling.LossScaleOptimizer,
        "loss_scale",
        property(lambda self: reads.append(1) or readable(self)),
    )
    fit(compiled(), Monitor(every=50), batches(120))
    # It reads at the start, after 50 and 100 steps, and at the end of the
    # epoch. A health check may read once more each time.
    assert len(reads) <= 8


def test_a_stuck_run_is_stopped_with_the_variable_named():
    stuck = {"loss_scale": rules.FixedLossScale(8.0)}
    monitor = Monitor(every=1, max_consecutive_skips=5)
    with pytest.raises(errors.LossScaleError, match="kernel"):
        fit(compiled(**stuck), monitor, batches(40, bad=range(40)))
    assert monitor.timeline[-1].consecutive_skips == 5
    # One skip fewer does not stop a run.
    bad = [1, 2, 3, 4, 7, 8, 9, 10]
    fit(compiled(**stuck), monitor, batches(12, bad=bad))
    assert monitor.timeline[-1].skipped_steps == 8


@pytest.mark.parametrize("own", [False, True])
def test_a_model_without_loss_scaling_trains_with_one_warning(own, caplog):
    sgd = keras.optimizers.SGD()
    sgd = keras.optimizers.LossScaleOptimizer(sgd) if own else sgd
    model = compiled(optimizer=sgd)
    history = fit(model, Monitor(every=1), batches(3))
    assert set(history) == {"loss"}
    (text,) = [text for text in caplog.messages if "nothing to show" in text]
    assert f"(its optimizer is {type(sgd).__name__})." in text


@pytest.mark.parametrize("name", ["every", "max_consecutive_skips"])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (2.5, TypeError)]
)
def test_numbers_below_one_are_refused(name, value, error):
    with pytest.raises(error, match=f"{name}={value}"):
        Monitor(**{name: value})


class Adversaries(keras.Model):
    """Trains two layers, each with its own optimizer, like a GAN."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(1) for _ in range(2)]
        self.each = [
            scaling.LossScaleOptimizer(
                keras.optimizers.SGD(0.1), loss_scale=rules.DynamicLossScale()
            )
            for _ in range(2)
        ]
        self.d_optimizer, self.g_optimizer = self.each

    def call(self, x):
        return [part(x[:, place]) for place, part in enumerate(self.parts)]

    def train_step(self, data):
        import tensorflow as tf

        x = data[0]
        losses = []
        for place, optimizer in enumerate(self.each):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x)[place] ** 2)
                scaled = optimizer.scale_loss(loss)
            weights = self.parts[place].trainable_variables
            optimizer.apply(tape.gradient(scaled, weights), weights)
            losses.append(loss)
        return {"d_loss": losses[0], "g_loss": losses[1]}


@pytest.mark.costly
@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_several_optimizers_are_shown_together(policy):
    # Under a policy, `compile` also wraps its default optimizer, which is
    # never used.
    keras.config.set_dtype_policy("float32")
    tfmix.set_global_policy(policy)
    x = np.ones((4, 2, 3), "float32")
    # Only the first layer gets a bad batch.
    x[1, 0] = np.inf
    monitor, model = Monitor(), Adversaries()
    model.compile()
    data = {"x": x, "y": np.zeros(4), "batch_size": 1}
    history = fit(model, monitor, data, epochs=2)
    assert history["skipped_steps"] == [1, 2]
    assert history["applied_steps"] == [7, 14]
    # A model that scales its own gradients does not lower the scale for bad
    # data.
    falls = [2.0**14, 2.0**13] if policy == "float32" else [2.0**15] * 2
    assert history["loss_scale"] == falls
    assert [reading.step for reading in monitor.timeline] == [0, 4, 8]


@helpers.requires_backend("tensorflow")
def test_a_run_is_stopped_where_one_of_several_optimizers_is_stuck():
    x = np.ones((8, 2, 3), "float32")
    x[:, 1] = np.inf
    model = Adversaries()
    model.compile()
    data = {"x": x, "y": np.zeros(8), "batch_size": 1}
    with pytest.raises(errors.LossScaleError):
        fit(model, Monitor(every=1, max_consecutive_skips=5), data)
