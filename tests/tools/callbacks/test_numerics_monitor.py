"""NumericsMonitor names the layer inside `fit`, and changes nothing else."""

import keras
import numpy as np
import pytest

from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.callbacks import numerics_monitor

Monitor = numerics_monitor.NumericsMonitor


JAX = keras.backend.backend() == "jax"


def healthy(jit_compile=False, **settings):
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(8, activation="relu", dtype="mixed_float16"),
        keras.layers.BatchNormalization(dtype="mixed_float16"),
        keras.layers.Dropout(0.2, seed=5, dtype="mixed_float16"),
        keras.layers.Dense(1, dtype="mixed_float16"),
        keras.layers.Activation("linear", dtype="float32"),
    ]
    model = keras.Sequential(layers)
    optimizer = scaling.LossScaleOptimizer(keras.optimizers.Adam())
    model.compile(optimizer, "mse", jit_compile=jit_compile, **settings)
    return model


def data(rows=24):
    generator = np.random.default_rng(0)
    return generator.normal(size=(rows, 4)), generator.normal(size=(rows, 1))


def train(model, *callbacks, **settings):
    settings = {"verbose": 0, "shuffle": False, "batch_size": 4} | settings
    return model.fit(*data(), callbacks=list(callbacks), **settings)


@pytest.mark.parametrize(
    "jit_compile", [JAX, pytest.param(not JAX, marks=pytest.mark.slow)]
)
def test_a_healthy_run_raises_no_alarm_and_is_not_changed(jit_compile):
    plain, watched = healthy(jit_compile), healthy(jit_compile)
    monitor = Monitor(every=4)
    expected = train(plain, epochs=2).history
    history = train(watched, monitor, epochs=2).history
    assert history.pop("numerics_events") == [0, 0]
    assert min(history.pop("headroom_bits")) > 0
    assert history == expected
    assert monitor.events == []
    assert not isinstance(watched.train_function, numerics_monitor.Tap)
    for left, right in zip(plain.variables, watched.variables, strict=True):
        np.testing.assert_array_equal(np.array(left), np.array(right))
    names = {layer.name for layer in watched.layers}
    assert names <= {row.layer for row in monitor.report.rows}


def test_a_sample_sees_the_weights_of_its_step():
    model, seen = healthy(), []

    class Reading(Monitor):
        def _look(self, step, batch):
            seen.append([np.array(w.value) for w in self._model.weights])

    before = [np.array(weight) for weight in model.weights]
    train(model, Reading(every=5))
    after = [np.array(weight) for weight in model.weights]
    assert len(seen) == 2
    for first, start in zip(seen[0], before, strict=True):
        np.testing.assert_array_equal(first, start)
    kernels = before[0], seen[1][0], after[0]
    assert not np.array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[1], kernels[2])


class Counting(Monitor):
    steps = ()

    def _look(self, step, batch):
        self.steps = (*self.steps, step)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("every", "stride", "steps"),
    [(1, 1, range(12)), (4, 1, (0, 4, 8)), (4, 3, (0, 9)), (50, 1, (0,))],
)
def test_steps_are_sampled_at_their_multiples(every, stride, steps):
    monitor = Counting(every=every)
    model = healthy(steps_per_execution=stride)
    # The second call continues the count, and waits for the next multiple.
    for _ in range(2):
        train(model, monitor)
    assert monitor.steps == tuple(steps)


def test_a_model_that_cannot_be_sampled_trains_with_one_warning(caplog):
    # It computes in float32, so there is nothing to compare.
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(scaling.LossScaleOptimizer("sgd"), "mse")
    train(model, Monitor(every=1))
    (text,) = [text for text in caplog.messages if "is off" in text]
    assert "No layer computes in 16 bit" in text


@pytest.mark.parametrize(
    ("every", "error"), [(0, ValueError), (1.5, TypeError)]
)
def test_wrong_arguments_are_refused(every, error):
    with pytest.raises(error, match=f"every={every}"):
        Monitor(every=every)
