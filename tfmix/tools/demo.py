"""Trains one network on scanned digits under four policies and compares.

The data are scikit-learn's 1,797 handwritten digits, scanned at 8 x 8 pixels.
Three in ten are held out for the test. Every policy starts from the same seeds,
so the rows of the table differ only in arithmetic. The last row is Keras's own
float16, from a single seed.

`make demo` and `tfmix demo` run it, in a minute on two cores.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfmix import _tables
from tfmix.autocast import float32_output, global_policy
from tfmix.policy import devices

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
# The policy that Keras itself has by that name, in place of tfmix's.
KERAS = "Keras's mixed_float16"
BATCH_SIZE, EPOCHS, SEEDS = 64, 6, 2
# The mean over the seeds must reach this accuracy, and stay within this gap
# between policies. Seeds of one policy differ by as much.
GOAL = (0.96, 0.015)


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of one training run."""

    policy: str
    seed: int
    accuracy: float  # share of the test images named correctly
    skipped_steps: int | None  # `None` if nothing counts them
    seconds: float  # in `fit`, compilation included
    activation_bytes: int  # all layers' outputs for one batch


@dataclasses.dataclass(frozen=True)
class Report(_tables.Printed):
    """All runs of the demo, with a verdict; prints as a table."""

    runs: tuple[Run, ...]
    epochs: int
    on_cpu: bool  # true if no accelerator was found

    def by_policy(self) -> dict[str, list[Run]]:
        """Returns the runs of each policy, one per seed."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.policy, []).append(run)
        return found

    @property
    def is_short(self) -> bool:
        """Returns whether the epochs are too few to reach the goal."""
        return self.epochs < EPOCHS

    @property
    def healthy(self) -> bool:
        """Returns whether all our policies are accurate, and equally so."""
        least, gap = GOAL
        means = [
            float(np.mean([run.accuracy for run in runs]))
            for policy, runs in self.by_policy().items()
            if policy != KERAS
        ]
        is_fine = min(means) >= least and max(means) - min(means) <= gap
        return self.is_short or is_fine

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return {**dataclasses.asdict(self), "healthy": self.healthy}

    def tables(self) -> list[_tables.Table]:
        """Returns the comparison, one row per policy."""
        least, gap = GOAL
        reached = "reached" if self.healthy else "MISSED"
        if self.is_short:
            reached = f"not judged, as it takes {EPOCHS} epochs"
        notes = [
            f"goal: at least {least:.0%} each, within {100 * gap:.1f} points "
            f"of each other: {reached}"
        ]
        if self.on_cpu:
            notes.append(
                "A CPU emulates float16, and most emulate bfloat16: the "
                "seconds say nothing about a GPU."
            )
        rows = [
            (name, *_cells(runs)) for name, runs in self.by_policy().items()
        ]
        return [_tables.Table(_HEADS, rows, notes=notes)]


_HEADS = (
    *("policy", "test accuracy\nmean (range)", "steps\nskipped"),
    *("seconds\nper run", "activations\nper batch"),
)


def run(
    epochs: int = EPOCHS, seeds: int = SEEDS, quiet: bool = False
) -> Report:
    """Trains under every policy from every seed.

    Args:
        epochs: Passes over the data. Six reach the goal.
        seeds: Runs per policy. Keras's own has one.
        quiet: Whether to print nothing.

    Returns:
        The `Report`.

    Raises:
        ValueError: If `epochs` or `seeds` is not a positive whole number.
    """
    for name, value in (("epochs", epochs), ("seeds", seeds)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"`{name}` must be a whole number of at least 1. "
                f"Received: {name}={value!r}."
            )
    data, runs = load(), []
    planned = [*itertools.product(POLICIES, range(seeds)), (KERAS, 0)]
    for policy, seed in planned:
        if not quiet:
            print(f"{policy}, seed {seed}: ", end="", flush=True)
        runs.append(train(policy, seed, data, epochs))
        if not quiet:
            print(f"{runs[-1].accuracy:.2%} in {runs[-1].seconds:.0f} s")
    on_cpu = all(device.kind == "CPU" for device in devices.devices())
    return Report(tuple(runs), epochs, on_cpu)


def load() -> list[np.ndarray]:
    """Returns training images, test images, and the labels of both."""
    from sklearn import datasets, model_selection

    digits = datasets.load_digits()
    images = (digits.images / 16.0).astype("float32")[..., np.newaxis]
    parts: list[np.ndarray] = model_selection.train_test_split(
        images,
        digits.target,
        test_size=0.3,
        stratify=digits.target,
        random_state=0,
    )
    return parts


@contextlib.contextmanager
def _policy_scope(policy: str) -> Iterator[None]:
    """Sets a policy, tfmix's or Keras's own, for a block."""
    if policy != KERAS:
        with global_policy.policy_scope(policy):
            yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def build_model(policy: str) -> keras.Model:
    """Builds the network under the policy that is active."""
    layers = keras.layers
    probabilities: keras.Layer = (
        # This is how Keras's guide keeps them in float32.
        layers.Activation("softmax", dtype="float32")
        if policy == KERAS
        else float32_output.float32_output("softmax")
    )
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
            probabilities,
        ]
    )


def train(policy: str, seed: int, data: list[np.ndarray], epochs: int) -> Run:
    """Trains and tests one network."""
    train_x, test_x, train_y, test_y = data
    # Batches are whole, because XLA would compile a smaller last one again.
    steps = len(train_x) // BATCH_SIZE
    kept = steps * BATCH_SIZE
    keras.utils.set_random_seed(seed)
    with _policy_scope(policy):
        model = build_model(policy)
        decay = keras.optimizers.schedules.CosineDecay(0.008, epochs * steps)
        optimizer: Any = keras.optimizers.Adam(decay)
        model.compile(
            optimizer,
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
        if policy == KERAS:
            # `compile` chooses tfmix's.
            model.optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        start = time.perf_counter()
        model.fit(
            train_x[:kept],
            train_y[:kept],
            batch_size=BATCH_SIZE,
            epochs=epochs,
            verbose=0,
        )
        seconds = time.perf_counter() - start
        _, accuracy = model.evaluate(
            test_x, test_y, batch_size=len(test_x), verbose=0
        )
    return Run(
        policy=policy,
        seed=seed,
        accuracy=float(accuracy),
        # Neither Keras's optimizer nor float32's counts them.
        skipped_steps=getattr(model.optimizer, "skipped_steps", None),
        seconds=seconds,
        activation_bytes=activation_bytes(model, train_x[:BATCH_SIZE]),
    )


def activation_bytes(model: keras.Model, batch: np.ndarray) -> int:
    """Runs a batch and adds up the bytes of every layer's output."""
    outputs = [layer.output for layer in model.layers]
    tensors = keras.Model(model.inputs, outputs)([batch])
    return sum(keras.ops.convert_to_numpy(tensor).nbytes for tensor in tensors)


def _cells(runs: list[Run]) -> list[str]:
    """Formats one row: means over the seeds, and the sum of skips."""
    accuracy = [100 * run.accuracy for run in runs]
    kibibytes = runs[0].activation_bytes / 1024
    skipped = [n for run in runs if (n := run.skipped_steps) is not None]
    return [
        f"{np.mean(accuracy):.2f} %\n"
        f"({min(accuracy):.2f} - {max(accuracy):.2f})",
        str(sum(skipped)) if skipped else "-",
        f"{np.mean([run.seconds for run in runs]):.1f}",
        f"{kibibytes:,.0f} KiB",
    ]
