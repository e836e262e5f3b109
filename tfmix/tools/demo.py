"""Trains one network on scanned digits under four policies and compares.

The data are scikit-learn's 1,797 handwritten digits, scanned at 8 x 8 pixels.
Three in ten are held out for the test. Every policy starts from the same seeds
and trains on the same images, so the rows of the table differ only in
arithmetic. The last row is Keras's own float16, from a single seed. A processor
that emulates a 16-bit format is slow. So the demo times a few batches in
float16 first, and trains on as many images as it has time for.

`make demo` and `tfmix demo` run it, in a minute and a half at most.
"""

import contextlib
import dataclasses
import itertools
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from rich import console, progress

from tfmix import _tables
from tfmix.autocast import float32_output, global_policy
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules
from tfmix.policy import devices

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
# The policy that Keras itself has by that name, in place of tfmix's.
KERAS = "Keras's mixed_float16"
BATCH_SIZE, EPOCHS, SEEDS = 64, 3, 2
# The mean over the seeds must reach this accuracy, and stay within this gap
# between policies. With a fifth of the images, seeds differ by up to 1 point;
# with all of them by 0.6.
GOAL = (0.98, 0.007)
GOAL_FOR_FEWER = (0.95, 0.01)
# The scans among the training images, and the copies of each: unchanged, and
# moved up, down, left and right.
SCANNED, COPIES = 1257, 5
# All steps together may take this many seconds. Starting, compiling and testing
# take half a minute more on two slow cores.
BUDGET = 45.0
# The number of timed batches, and of the first ones, which compile.
TIMED, COMPILING = 10, 3


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of one training run."""

    policy: str
    seed: int
    accuracy: float  # share of the test images named correctly
    losses: tuple[float, ...]  # training loss of each epoch
    loss_scale: float  # the scale at the end
    skipped_steps: int | None  # `None` if nothing counts them
    seconds: float  # in `fit`, compilation included
    activation_bytes: int  # all layers' outputs for one batch
    rows: int  # images of an epoch
    on_cpu: bool = False  # true if no accelerator was found


@dataclasses.dataclass(frozen=True)
class Report(_tables.Printed):
    """All runs of the demo, with a verdict; prints as a table."""

    runs: tuple[Run, ...]
    plot: str | None = None

    def by_policy(self) -> dict[str, list[Run]]:
        """Returns the runs of each policy, one per seed."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.policy, []).append(run)
        return found

    @property
    def rows(self) -> int:
        """The number of images that every run trained on."""
        return self.runs[0].rows

    def goal(self) -> tuple[float, float]:
        """Returns the accuracy and the gap to reach."""
        return GOAL if self.rows > 4 * SCANNED else GOAL_FOR_FEWER

    @property
    def is_short(self) -> bool:
        """Returns whether the epochs are too few to reach the goal."""
        return len(self.runs[0].losses) < EPOCHS

    @property
    def healthy(self) -> bool:
        """Returns whether all our policies are accurate, and equally so."""
        if self.is_short:
            return True
        least, gap = self.goal()
        means = [
            float(np.mean([run.accuracy for run in runs]))
            for policy, runs in self.by_policy().items()
            if policy != KERAS
        ]
        return min(means) >= least and max(means) - min(means) <= gap

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return {**dataclasses.asdict(self), "healthy": self.healthy}

    def tables(self) -> list[_tables.Table]:
        """Returns the comparison, one row per policy."""
        least, gap = self.goal()
        reached = "reached" if self.healthy else "MISSED"
        if self.is_short:
            reached = f"not judged, as it takes {EPOCHS} epochs"
        notes = [
            f"goal, with {self.rows:,} images: at least {least:.0%} each, "
            f"within {100 * gap:.1f} points of each other: {reached}"
        ]
        if self.runs[0].on_cpu:
            notes.append(
                "A CPU emulates float16, and most emulate bfloat16: the "
                "seconds say nothing about a GPU."
            )
        if self.plot:
            notes.append(f"loss curves: {self.plot}")
        rows = [
            (name, *_cells(runs)) for name, runs in self.by_policy().items()
        ]
        return [_tables.Table(_HEADS, rows, notes=notes)]


_HEADS = (
    *("policy", "test accuracy\nmean (range)", "final\nscale"),
    *("steps\nskipped", "seconds\nper run", "activations\nper batch"),
)


def run(
    out: str | None = "out",
    epochs: int = EPOCHS,
    seeds: int = SEEDS,
    quiet: bool = False,
) -> Report:
    """Trains under every policy from every seed.

    Args:
        out: Folder for the plot of the loss curves; `None` for no plot, and
            none is drawn where matplotlib is missing.
        epochs: Passes over the data. Three reach the goal.
        seeds: Runs per policy. Keras's own has one.
        quiet: Whether to leave out the progress bar.

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
    columns = progress.Progress.get_default_columns()
    shown = (*columns, progress.TextColumn("{task.fields[loss]}"))
    # Before rich 14.3 a disabled bar still ended with an empty line.
    terminal = console.Console(quiet=quiet)
    with progress.Progress(*shown, console=terminal, disable=quiet) as bar:
        planned = [*itertools.product(POLICIES, range(seeds)), (KERAS, 0)]
        total = len(planned) * epochs
        task = bar.add_task("timing a few batches", total=total, loss="")

        def tick(epoch: int, logs: dict[str, float]) -> None:
            bar.update(task, advance=1, loss=f"loss {logs['loss']:.4f}")

        data, runs = load(), []
        copies = _copies_in_time(data, total, terminal.print)
        data = first_copies(data, copies)
        for policy, seed in planned:
            name = f"{policy}, seed {seed}"
            bar.update(task, description=name)
            ticks = keras.callbacks.LambdaCallback(on_epoch_end=tick)
            run = train(policy, seed, data, epochs, [ticks])
            runs.append(run)
            # Outputs other than a terminal show only the end of the bar.
            terminal.print(f"{name}: {run.accuracy:.2%} in {run.seconds:.0f} s")
    report = Report(tuple(runs))
    path = plot(report, pathlib.Path(out)) if out is not None else None
    return dataclasses.replace(report, plot=path)


def _copies_in_time(
    data: tuple[Any, ...], epochs: int, say: Callable[[str], None]
) -> int:
    """Times a few batches; returns how many copies of the images to use."""
    # A terminal shows only the bar, and other outputs nothing.
    say("timing a few batches in float16, the slowest where it is emulated")
    batch = seconds_of_a_batch("mixed_float16", data)
    say(f"mixed_float16: {1000 * batch:.1f} ms a batch")
    seconds = batch * epochs * SCANNED / BATCH_SIZE
    copies = min(max(int(BUDGET / seconds), 1), COPIES)
    if copies < COPIES:
        say(f"{copies} of {COPIES} parts of the images: less to wait for")
    return copies


def load() -> tuple[Any, ...]:
    """Returns training images, test images, and the labels of both."""
    from sklearn import datasets, model_selection

    digits = datasets.load_digits()
    images = (digits.images / 16.0).astype("float32")[..., np.newaxis]
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        images,
        digits.target,
        test_size=0.3,
        stratify=digits.target,
        random_state=0,
    )
    return with_half_shifts(train_x), test_x, np.tile(train_y, 5), test_y


def first_copies(data: tuple[Any, ...], copies: int) -> tuple[Any, ...]:
    """Returns the data with some copies of the images; one is unchanged."""
    train_x, test_x, train_y, test_y = data
    kept = copies * SCANNED
    return train_x[:kept], test_x, train_y[:kept], test_y


class Pace(keras.callbacks.Callback):
    """Measures the batches after those that compile.

    Attributes:
        seconds: The time of the fastest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = math.inf

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reads the clock."""
        if batch >= COMPILING:
            seconds = time.perf_counter() - self._start
            self.seconds = min(self.seconds, seconds)


def seconds_of_a_batch(policy: str, data: tuple[Any, ...]) -> float:
    """Trains a network on a few batches, and returns the time of one."""
    kept, pace = TIMED * BATCH_SIZE, Pace()
    with _policy_scope(policy):
        model = compiled_model(policy, steps=TIMED)
        _fit(model, data[0][:kept], data[2][:kept], 1, [pace])
    return pace.seconds


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


def with_half_shifts(images: np.ndarray) -> np.ndarray:
    """Adds each image moved by half a pixel up, down, left and right."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    moved = [
        (images + padded[:, row : row + 8, column : column + 8]) / 2
        for row, column in ((0, 1), (2, 1), (1, 0), (1, 2))
    ]
    return np.concatenate([images, *moved])


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


def compiled_model(policy: str, steps: int) -> keras.Model:
    """Builds the network, compiled for a number of steps."""
    model = build_model(policy)
    decay = keras.optimizers.schedules.CosineDecay(0.008, steps)
    optimizer = keras.optimizers.Adam(decay)
    # Keras wraps it in a scaler of its own.
    if policy != KERAS:
        optimizer = scaling.LossScaleOptimizer(
            optimizer, loss_scale=loss_scale_for(policy)
        )
    model.compile(
        optimizer,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def _fit(
    model: keras.Model, x: Any, y: Any, epochs: int, callbacks: list
) -> keras.callbacks.History:
    return model.fit(
        x,
        y,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
    )


def train(
    policy: str,
    seed: int,
    data: tuple[Any, ...],
    epochs: int,
    callbacks: list[keras.callbacks.Callback],
) -> Run:
    """Trains and tests one network."""
    train_x, test_x, train_y, test_y = data
    # Batches are whole, because XLA would compile a smaller last one again.
    steps = len(train_x) // BATCH_SIZE
    train_x, train_y = (part[: steps * BATCH_SIZE] for part in data[::2])
    keras.utils.set_random_seed(seed)
    with _policy_scope(policy):
        model = compiled_model(policy, epochs * steps)
        start = time.perf_counter()
        history = _fit(model, train_x, train_y, epochs, callbacks)
        seconds = time.perf_counter() - start
        _, accuracy = model.evaluate(
            test_x, test_y, batch_size=len(test_x), verbose=0
        )
    return Run(
        policy=policy,
        seed=seed,
        accuracy=float(accuracy),
        losses=tuple(history.history["loss"]),
        loss_scale=float(
            model.optimizer.dynamic_scale
            if policy == KERAS
            else model.optimizer.loss_scale
        ),
        # Keras does not count them.
        skipped_steps=None
        if policy == KERAS
        else int(model.optimizer.skipped_steps),
        seconds=seconds,
        activation_bytes=activation_bytes(model, train_x[:BATCH_SIZE]),
        rows=len(train_x),
        on_cpu=all(device.kind == "CPU" for device in devices.devices()),
    )


def loss_scale_for(policy: str) -> Any:
    """Returns a format's loss scale; only float16 needs one."""
    if policy == "mixed_float16":
        # It grows ten times faster than the default, to move in a short run.
        return rules.DynamicLossScale(growth_steps=200)
    return rules.NoLossScale()


def activation_bytes(model: keras.Model, batch: np.ndarray) -> int:
    """Runs a batch and adds up the bytes of every layer's output."""
    outputs = [layer.output for layer in model.layers]
    tensors = keras.Model(model.inputs, outputs)([batch])
    return sum(keras.ops.convert_to_numpy(tensor).nbytes for tensor in tensors)


def plot(report: Report, folder: pathlib.Path) -> str | None:
    """Draws the loss curves; returns the file, or None without matplotlib."""
    try:
        from matplotlib import figure
    except ModuleNotFoundError:
        return None
    drawn = figure.Figure(figsize=(7, 4), layout="constrained")
    axes = drawn.subplots()
    styles = dict(zip((*POLICIES, KERAS), ("-", "--", ":", "-."), strict=True))
    for policy, runs in report.by_policy().items():
        losses = np.array([run.losses for run in runs])
        epochs = np.arange(1, losses.shape[1] + 1)
        axes.plot(
            epochs,
            losses.mean(axis=0),
            styles[policy],
            marker="o",
            label=policy,
        )
        axes.fill_between(epochs, losses.min(0), losses.max(0), alpha=0.15)
    axes.set(
        xlabel="epoch",
        ylabel="training loss",
        yscale="log",
        title="Digits: mean over seeds, band from lowest to highest",
    )
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits.png"
    drawn.savefig(path, dpi=150)
    return str(path)


def _cells(runs: list[Run]) -> list[str]:
    """Formats one row: means over the seeds, the scales, the sum of skips."""
    accuracy = [100 * run.accuracy for run in runs]
    scales = sorted({run.loss_scale for run in runs})
    kibibytes = runs[0].activation_bytes / 1024
    skipped = [n for run in runs if (n := run.skipped_steps) is not None]
    return [
        f"{np.mean(accuracy):.2f} %\n"
        f"({min(accuracy):.2f} - {max(accuracy):.2f})",
        "\n".join(f"2^{np.log2(scale):g}" for scale in scales),
        str(sum(skipped)) if len(skipped) == len(runs) else "-",
        f"{np.mean([run.seconds for run in runs]):.1f}",
        f"{kibibytes:,.0f} KiB",
    ]
