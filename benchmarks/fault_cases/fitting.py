"""Faults of one bad batch in `fit`."""

from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import words
from benchmarks.fault_cases.record import Fault, Outcome, fault

_BATCH = 8
BATCHES = 20
_BAD_BATCH = 10


def data(bad_value: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns 20 batches of 8 rows; one row of the 11th is `bad_value`."""
    generator = np.random.default_rng(7)
    x = generator.normal(size=(_BATCH * BATCHES, 4)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) > 0).astype("float32")
    x[_BAD_BATCH * _BATCH] = bad_value
    return x, y


def compiled(system: Any, *layers: Any, **settings: Any) -> Any:
    """Returns a small float16 classifier, compiled and guarded."""
    keras.utils.set_random_seed(3)
    policy = {"dtype": system.policy}
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="float32"),
            keras.layers.Dense(8, **policy),
            *layers,
            keras.layers.Dense(1, activation="sigmoid", dtype="float32"),
        ]
    )
    inner = settings.pop("optimizer", None) or keras.optimizers.SGD(0.05)
    model.compile(
        system.wrap(inner, initial_scale=1024.0),
        loss="binary_crossentropy",
        metrics=["mae"],
        **settings,
    )
    return system.guard(model)


def fit(model: Any, bad_value: float = np.nan, **arguments: Any) -> Any:
    """Trains on the batches in order, one epoch by default."""
    in_order = {"batch_size": _BATCH, "shuffle": False, "verbose": 0}
    return model.fit(*data(bad_value), **in_order, **arguments)


@fault()
def batch_normalization(system: Any) -> Outcome:
    """A row of 1e6 overflows the forward pass before BatchNormalization."""
    normalization = keras.layers.BatchNormalization(dtype=system.policy)
    model = compiled(system, normalization)
    fit(model, 1e6, epochs=2)
    clean = (array[: _BAD_BATCH * _BATCH] for array in data(1e6))
    val_loss = model.evaluate(*clean, verbose=0)[0]
    statistics = words.finite(model.non_trainable_variables)
    return Outcome(
        statistics and bool(np.isfinite(val_loss)),
        f"moving statistics {'finite' if statistics else 'destroyed'}, "
        f"validation loss {val_loss:.3g}",
    )


@fault()
def epoch_metrics(system: Any) -> Outcome:
    """One batch of NaN in an epoch: the epoch's loss and metrics."""
    model = compiled(system)
    logs = fit(model).history
    values = {name: numbers[-1] for name, numbers in logs.items()}
    shown = ", ".join(f"{name} {v:.3g}" for name, v in sorted(values.items()))
    return Outcome(
        bool(np.isfinite(list(values.values())).all()),
        f"{shown}; {words.weights(model.trainable_variables)}",
    )


@fault()
def terminate_on_nan(system: Any) -> Outcome:
    """One batch of NaN in a healthy run that uses TerminateOnNaN."""
    model = compiled(system)
    stop = keras.callbacks.TerminateOnNaN()
    history = fit(model, epochs=3, callbacks=[stop])
    epochs = len(history.epoch)
    steps = int(model.optimizer.iterations)
    return Outcome(
        epochs == 3 and not model.stop_training,
        f"{epochs} of 3 epochs, {steps} of {3 * (BATCHES - 1)} good steps",
    )


class _RunningMean(keras.layers.Layer):
    """A custom layer that keeps an average of its inputs."""

    def build(self, input_shape: Any) -> None:
        self.mean = self.add_weight(
            shape=(),
            dtype="float32",
            initializer="zeros",
            trainable=False,
            autocast=False,
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            batch = keras.ops.mean(keras.ops.cast(inputs, "float32"))
            self.mean.assign(0.9 * self.mean + 0.1 * batch)
        return inputs


@fault()
def own_state(system: Any) -> Outcome:
    """One batch of NaN; a user's layer averages its inputs."""
    layer = _RunningMean(dtype=system.policy)
    model = compiled(system, layer)
    fit(model)
    mean = float(words.to_numpy(layer.mean))
    return Outcome(bool(np.isfinite(mean)), f"the layer's average is {mean:g}")


def _weights_after(system: Any, bad: int | None) -> list[np.ndarray]:
    """Trains on micro-batches, a bad one before that number in addition."""
    inner = keras.optimizers.SGD(0.05, gradient_accumulation_steps=4)
    model = compiled(system, optimizer=inner)
    x, y = data(bad_value=0.5)
    # There are two windows of four batches.
    for position in range(8):
        rows = slice(position * _BATCH, (position + 1) * _BATCH)
        if position == bad:
            broken = np.full_like(x[rows], np.nan)
            model.train_on_batch(broken, y[rows])
        model.train_on_batch(x[rows], y[rows])
    return words.snapshot(model.trainable_variables)


@fault()
def accumulation_window(system: Any) -> Outcome:
    """A bad micro-batch at each index of an accumulation window of four."""
    expected = _weights_after(system, bad=None)
    right = [
        words.same(expected, _weights_after(system, bad)) for bad in range(4)
    ]
    return Outcome(
        all(right),
        f"{sum(right)} of 4 positions end in the weights of a run without "
        "that micro-batch",
    )


def _bad_batch_under(name: str, **arguments: Any) -> Fault:
    def provoke(system: Any) -> Outcome:
        normalization = keras.layers.BatchNormalization(dtype=system.policy)
        model = compiled(system, normalization, **arguments)
        logs = fit(model).history
        weights = words.finite(model.variables)
        loss = logs["loss"][-1]
        skipped = words.skipped(model.optimizer, BATCHES)
        return Outcome(
            weights and bool(np.isfinite(loss)) and skipped == 1,
            f"{'all' if weights else 'not all'} variables finite, loss "
            f"{loss:.3g}, {words.progress(model.optimizer, BATCHES)}",
        )

    title = f"One batch of NaN in `fit` with {name}"
    return Fault("fit-" + name.replace("_", "-"), title, provoke)


UNDER_XLA = _bad_batch_under("jit_compile", jit_compile=True)
SEVERAL_STEPS = _bad_batch_under("steps_per_execution", steps_per_execution=5)
