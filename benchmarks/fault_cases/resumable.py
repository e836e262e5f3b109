"""A run of 60 steps that can be killed after any step, and resumed.

python -m benchmarks.fault_cases.resumable SYSTEM DIRECTORY KILL_AFTER DEVICES

splits the CPU into DEVICES, trains, saves in every way after each seventh step,
and kills itself with SIGKILL after step KILL_AFTER. `resume` continues from one
of the saved states.
"""

import json
import os
import pathlib
import signal
import sys
from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import systems, words

EPOCHS = 6
STEPS_PER_EPOCH = 10
STEPS = EPOCHS * STEPS_PER_EPOCH
# 7 divides neither an epoch nor the growth window of 4, so states are saved at
# any place in both.
SAVE_EVERY = 7
_GROWTH_STEPS = 4
_BAD_BATCH = 5


class Batches(keras.utils.PyDataset):
    """The batches of an epoch, equal in each epoch; the sixth is NaN."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first

    def __len__(self) -> int:
        return STEPS_PER_EPOCH - self.first

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        number = self.first + index
        generator = np.random.default_rng(number)
        x = generator.normal(size=(8, 4)).astype("float32")
        y = x.sum(axis=1, keepdims=True)
        if number == _BAD_BATCH:
            x[0, 0] = np.nan
        return x, y


def build(system: Any) -> Any:
    """Returns the model at its first step, compiled and guarded."""
    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="float32"),
            keras.layers.Dense(8, dtype=system.policy),
            keras.layers.BatchNormalization(dtype=system.policy),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = system.wrap(
        keras.optimizers.Adam(0.01),
        initial_scale=1024.0,
        dynamic_growth_steps=_GROWTH_STEPS,
    )
    model.compile(optimizer, loss="mse")
    optimizer.build(model.trainable_variables)
    return system.guard(model)


def state(model: Any) -> dict[str, np.ndarray]:
    """Copies all state that a resumed run must restore."""
    optimizer = model.optimizer.variables
    pairs = [(f"model {v.path}", v) for v in model.weights]
    pairs += [(f"{n} {v.path}", v) for n, v in enumerate(optimizer)]
    return {name: words.to_numpy(variable) for name, variable in pairs}


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Returns the names whose bits differ between two states.

    Raises:
        ValueError: If the numbers of variables differ.
    """
    # Variables are compared by position, because a new model has other paths.
    pairs = zip(left.items(), right.values(), strict=True)
    return [
        name for (name, one), other in pairs if not words.same([one], [other])
    ]


def train(model: Any, start: int = 0, callbacks: Any = ()) -> Any:
    """Trains a model from a step to the last one."""
    epoch, first = divmod(start, STEPS_PER_EPOCH)
    arguments = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    if first:
        model.fit(Batches(first), **arguments)
        epoch += 1
    if epoch < EPOCHS:
        model.fit(Batches(), initial_epoch=epoch, epochs=EPOCHS, **arguments)
    return model


def ways() -> list[str]:
    """Returns the ways to save a state on this backend."""
    every = ["keras", "weights", "backup-epoch", "backup-batch"]
    if keras.backend.backend() == "tensorflow":
        return [*every, "checkpoint"]
    return every


def _backup(directory: pathlib.Path, way: str) -> Any:
    every = {"backup-epoch": "epoch", "backup-batch": SAVE_EVERY}[way]
    path = str(directory / way)
    return keras.callbacks.BackupAndRestore(path, save_freq=every)


class _SaveAndDie(keras.callbacks.Callback):
    """Saves in the ways that have no callback in Keras, then dies."""

    def __init__(self, directory: pathlib.Path, kill_after: int) -> None:
        super().__init__()
        self._directory = directory
        self._kill_after = kill_after
        self._step = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        if self._step % SAVE_EVERY == 0:
            self._save()
        if self._step == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def _save(self) -> None:
        self.model.save(self._directory / "model.keras")
        self.model.save_weights(self._directory / "model.weights.h5")
        if keras.backend.backend() == "tensorflow":
            _checkpoint(self.model).write(str(self._directory / "checkpoint"))
        (self._directory / "step").write_text(str(self._step))


def _checkpoint(model: Any) -> Any:
    import tensorflow as tf

    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def resume(system: Any, directory: pathlib.Path, way: str) -> Any:
    """Builds the model again and trains it to the end from a saved state.

    Args:
        system: The system that wraps the optimizer.
        directory: The folder of the killed run.
        way: One of `ways()`.

    Returns:
        The trained model.
    """
    if way == "backup-epoch":
        return train(build(system), callbacks=[_backup(directory, way)])
    if way == "backup-batch":
        return _resume_within_epoch(system, directory)
    step = int((directory / "step").read_text())
    if way == "keras":
        model = keras.saving.load_model(directory / "model.keras")
        return train(system.guard(model), step)
    model = build(system)
    if way == "weights":
        model.load_weights(directory / "model.weights.h5")
    else:
        reader = _checkpoint(model).read(str(directory / "checkpoint"))
        reader.assert_consumed()
    return train(model, step)


def _resume_within_epoch(system: Any, directory: pathlib.Path) -> Any:
    # BackupAndRestore restores the state after a batch, but starts its epoch
    # again: the user's data must continue at the right batch.
    metadata = directory / "backup-batch" / "training_metadata.json"
    where = json.loads(metadata.read_text())
    epoch, first = where["epoch"], where["batch"] + 1
    backup = _backup(directory, "backup-batch")
    model = build(system)
    model.fit(
        Batches(first),
        epochs=epoch + 1,
        shuffle=False,
        verbose=0,
        callbacks=[backup],
    )
    # Otherwise Keras would continue from the epoch in the backup.
    model._initial_epoch = None
    return train(model, (epoch + 1) * STEPS_PER_EPOCH)


def devices() -> int:
    """Returns into how many devices this process has split its CPU."""
    if keras.backend.backend() == "jax":
        return 1
    import tensorflow as tf

    return len(tf.config.list_logical_devices("CPU"))


def split_the_cpu(count: int) -> None:
    """Splits the CPU under TensorFlow, whose sums depend on the parts."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )


def main(system_name: str, directory: str, kill_after: str, cpus: str) -> None:
    """Trains until the process is killed."""
    split_the_cpu(int(cpus))
    path = pathlib.Path(directory)
    callbacks = [
        _backup(path, "backup-epoch"),
        _backup(path, "backup-batch"),
        _SaveAndDie(path, int(kill_after)),
    ]
    train(build(systems.by_name(system_name)), callbacks=callbacks)


if __name__ == "__main__":
    main(*sys.argv[1:])
