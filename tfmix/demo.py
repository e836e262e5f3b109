"""Trains one network on scanned digits under three policies and compares.

The data are scikit-learn's 1,797 handwritten digits, scanned at 8 x 8 pixels.
Three in ten are held out for the test, and every policy starts from the same
seeds, so the rows of the table differ only in arithmetic. A processor may
emulate a 16-bit format; that policy then trains on fewer images, and so does
float32 once more, to compare with.

`make demo` and `tfmix demo` run it, in about a minute on two cores.
"""

import dataclasses
import math
import pathlib
import time
from typing import Any

import keras
import numpy as np
from rich import box, console, progress, table

from tfmix.autocast import float32_output, global_policy
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules
from tfmix.policy.devices import devices

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
BATCH_SIZE, EPOCHS, SEEDS = 64, 8, 2
# What the mean over the seeds must reach: accuracy, and the largest gap between
# policies that trained on the same images. With a fifth of the images, seeds
# differ by up to 1 point (0.6 with all of them).
GOAL = (0.98, 0.007)
GOAL_FOR_FEWER = (0.95, 0.01)
# How many times as long as in float32 an epoch may take. CPUs that emulate a
# format take three times as long or longer, others at most 1.5 times.
SLOW = 2.0


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run came to."""

    policy: str
    seed: int
    accuracy: float  # share of the test images named correctly
    losses: tuple[float, ...]  # training loss of each epoch
    loss_scale: float  # after the last step
    skipped_steps: int
    seconds: float  # in `fit`, compilation included
    activation_bytes: int  # all layers' outputs for one batch
    rows: int  # images of an epoch


@dataclasses.dataclass(frozen=True)
class Report:
    """All runs of the demo, as records, a table and a verdict."""

    runs: tuple[Run, ...]
    plot: str | None = None

    def groups(self) -> dict[tuple[int, str], list[Run]]:
        """Returns the runs by number of images and policy, one per seed."""
        found: dict[tuple[int, str], list[Run]] = {}
        for run in self.runs:
            found.setdefault((run.rows, run.policy), []).append(run)
        return found

    def goals(self) -> dict[int, tuple[float, float]]:
        """Returns accuracy and gap to reach, by number of images."""
        sizes = sorted({run.rows for run in self.runs}, reverse=True)
        return {
            rows: GOAL if rows == sizes[0] else GOAL_FOR_FEWER for rows in sizes
        }

    @property
    def healthy(self) -> bool:
        """Whether every policy is accurate, and as accurate as the others."""
        for rows, (least, gap) in self.goals().items():
            means = [
                float(np.mean([run.accuracy for run in runs]))
                for (size, _), runs in self.groups().items()
                if size == rows
            ]
            if min(means) < least or max(means) - min(means) > gap:
                return False
        return True

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return {**dataclasses.asdict(self), "healthy": self.healthy}

    def table(self) -> table.Table:
        """Returns the comparison, one row per policy, for rich to print."""
        wanted = [
            f"at least {least:.0%} each with {rows:,} images, within "
            f"{100 * gap:.1f} points of each other"
            for rows, (least, gap) in self.goals().items()
        ]
        reached = "reached" if self.healthy else "MISSED"
        caption = "goal: " + ";\n".join(wanted) + f": {reached}"
        if self.plot:
            caption += f"\nloss curves: {self.plot}"
        drawn = table.Table(
            *("policy\nimages", "test accuracy\nmean (range)", "final\nscale"),
            *("steps\nskipped", "seconds\nper run", "activations\nper batch"),
            box=box.SIMPLE_HEAD,
            caption=caption,
            caption_justify="left",
        )
        for (rows, policy), runs in self.groups().items():
            drawn.add_row(f"{policy}\n{rows:,}", *_cells(runs))
        return drawn


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
        epochs: Passes over the data. Eight reach the plateau.
        seeds: Runs per policy.
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
        trainings = _Trainings(bar, epochs, seeds)
        _compare(trainings, load())
    report = Report(tuple(trainings.runs))
    path = plot(report, pathlib.Path(out)) if out is not None else None
    return dataclasses.replace(report, plot=path)


class _Trainings:
    """Trains from every seed, and shows its progress."""

    def __init__(self, bar: progress.Progress, epochs: int, seeds: int) -> None:
        self.bar, self.epochs, self.seeds = bar, epochs, seeds
        self.task = bar.add_task("training", total=0, loss="")
        self.runs: list[Run] = []
        self.planned = 0

    def plan(self, policies: int) -> None:
        """Adds the epochs of some policies to what the bar counts to."""
        self.planned += policies * self.seeds * self.epochs
        self.bar.update(self.task, total=self.planned)

    def train(
        self, policy: str, data: tuple[Any, ...], limit: float = math.inf
    ) -> "Pace":
        """Returns the pace of the first seed; beyond `limit` it is the last."""
        first = Pace(limit)
        for seed in range(self.seeds):
            name = f"{policy}, seed {seed}"
            self.bar.update(self.task, description=name)
            pace = Pace() if seed else first
            ticks = keras.callbacks.LambdaCallback(on_epoch_end=self._tick)
            run = train(policy, seed, data, self.epochs, [ticks, pace])
            if pace.too_slow:
                self.bar.update(
                    self.task, completed=len(self.runs) * self.epochs
                )
                break
            self.runs.append(run)
            # Where the output is no terminal, the bar shows only its end.
            self.print(f"{name}: {run.accuracy:.2%}")
        return first

    def print(self, line: str) -> None:
        """Prints a line above the bar."""
        if not self.bar.disable:
            self.bar.console.print(line)

    def _tick(self, epoch: int, logs: dict[str, float]) -> None:
        self.bar.update(self.task, advance=1, loss=f"loss {logs['loss']:.4f}")


def _compare(trainings: _Trainings, data: tuple[Any, ...]) -> None:
    """Trains under each policy, on fewer images where it is emulated."""
    trainings.plan(len(POLICIES))
    float32 = trainings.train("float32", data).seconds
    on_cpu = {device.kind for device in devices()} == {"CPU"}
    limit = SLOW * float32 if on_cpu else math.inf
    emulated = []
    for policy in POLICIES[1:]:
        pace = trainings.train(policy, data, limit)
        if pace.too_slow:
            emulated.append(policy)
            times = pace.seconds / float32
            trainings.print(
                f"This processor emulates {policy.removeprefix('mixed_')} "
                f"({times:.1f} times as slow): fewer images for it"
            )
    if emulated:
        trainings.plan(1)
        for policy in ("float32", *emulated):
            trainings.train(policy, without_shifts(data))


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


def without_shifts(data: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the data with the training images as they were scanned."""
    train_x, test_x, train_y, test_y = data
    scanned = len(train_x) // 5
    return train_x[:scanned], test_x, train_y[:scanned], test_y


class Pace(keras.callbacks.Callback):
    """Measures an epoch, and ends a training whose epochs take too long.

    Args:
        limit: Seconds that the second or the third epoch must not exceed. The
            first one compiles.

    Attributes:
        seconds: What the fastest epoch after the first took.
        too_slow: Whether the training was ended.
    """

    def __init__(self, limit: float = math.inf) -> None:
        super().__init__()
        self.limit, self.seconds, self.too_slow = limit, math.inf, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads it."""
        if epoch:
            seconds = time.perf_counter() - self._start
            self.seconds = min(self.seconds, seconds)
        if epoch == 2 and self.seconds > self.limit:
            self.model.stop_training = self.too_slow = True


def with_half_shifts(images: np.ndarray) -> np.ndarray:
    """Adds each image moved by half a pixel up, down, left and right."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    moved = [
        (images + padded[:, row : row + 8, column : column + 8]) / 2
        for row, column in ((0, 1), (2, 1), (1, 0), (1, 2))
    ]
    return np.concatenate([images, *moved])


def build_model() -> keras.Model:
    """Builds the network under the policy that is active."""
    layers = keras.layers
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
            float32_output.float32_output("softmax"),
        ]
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
    # Whole batches: for a smaller last one, XLA would compile again.
    steps = len(train_x) // BATCH_SIZE
    train_x, train_y = (part[: steps * BATCH_SIZE] for part in data[::2])
    keras.utils.set_random_seed(seed)
    with global_policy.policy_scope(policy):
        model = build_model()
        decay = keras.optimizers.schedules.CosineDecay(0.003, epochs * steps)
        optimizer = scaling.LossScaleOptimizer(
            keras.optimizers.Adam(decay), loss_scale=loss_scale_for(policy)
        )
        model.compile(
            optimizer,
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
        start = time.perf_counter()
        history = model.fit(
            train_x,
            train_y,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            verbose=0,
            callbacks=callbacks,
        )
        seconds = time.perf_counter() - start
        _, accuracy = model.evaluate(
            test_x, test_y, batch_size=len(test_x), verbose=0
        )
    return Run(
        policy=policy,
        seed=seed,
        accuracy=float(accuracy),
        losses=tuple(history.history["loss"]),
        loss_scale=float(optimizer.loss_scale),
        skipped_steps=int(optimizer.skipped_steps),
        seconds=seconds,
        activation_bytes=activation_bytes(model, train_x[:BATCH_SIZE]),
        rows=len(train_x),
    )


def loss_scale_for(policy: str) -> Any:
    """Returns the loss scale a format needs: only float16 lacks range."""
    if policy == "mixed_float16":
        # Grows ten times faster than the default, to move in a short run.
        return rules.DynamicLossScale(growth_steps=200)
    return rules.NoLossScale()


def activation_bytes(model: keras.Model, batch: np.ndarray) -> int:
    """Runs a batch and adds up what every layer's output occupies."""
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
    styles = dict(zip(POLICIES, ("-", "--", ":"), strict=True))
    for (rows, policy), runs in report.groups().items():
        losses = np.array([run.losses for run in runs])
        epochs = np.arange(1, losses.shape[1] + 1)
        label = f"{policy}, {rows:,} images"
        axes.plot(
            epochs, losses.mean(axis=0), styles[policy], marker="o", label=label
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
    return [
        f"{np.mean(accuracy):.2f} %\n"
        f"({min(accuracy):.2f} - {max(accuracy):.2f})",
        "\n".join(f"2^{np.log2(scale):g}" for scale in scales),
        str(sum(run.skipped_steps for run in runs)),
        f"{np.mean([run.seconds for run in runs]):.1f}",
        f"{kibibytes:,.0f} KiB",
    ]
