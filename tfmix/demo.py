"""Trains one network on scanned digits under three policies and compares.

The data are scikit-learn's 1,797 handwritten digits, scanned at 8 x 8 pixels.
Three in ten are held out for the test, and every policy starts from the same
seeds, so that what differs in the table is the arithmetic.

`make demo` and `tfmix demo` run it, in about a minute on two cores.
"""

import dataclasses
import pathlib
import time
from typing import Any

import keras
import numpy as np
from rich import box, progress, table

from tfmix import float32_head
from tfmix.in_force.global_policy import current_policy
from tfmix.scaling import optimizer as scaling
from tfmix.scaling import rules

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
BATCH_SIZE, EPOCHS, SEEDS = 64, 8, 3
# What the demo promises of the mean over the seeds.
LEAST_ACCURACY = 0.98
LARGEST_GAP = 0.007


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


@dataclasses.dataclass(frozen=True)
class Report:
    """All runs of the demo, as records, a table and a verdict."""

    runs: tuple[Run, ...]
    plot: str | None = None

    def of(self, policy: str) -> list[Run]:
        """Returns the runs of one policy, one per seed."""
        return [run for run in self.runs if run.policy == policy]

    @property
    def healthy(self) -> bool:
        """Whether every policy is accurate, and as accurate as the others."""
        means = [
            np.mean([run.accuracy for run in self.of(policy)])
            for policy in POLICIES
        ]
        gap = max(means) - min(means)
        return bool(min(means) >= LEAST_ACCURACY and gap <= LARGEST_GAP)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return {**dataclasses.asdict(self), "healthy": self.healthy}

    def table(self) -> table.Table:
        """Returns the comparison, one row per policy, for rich to print."""
        reached = "reached" if self.healthy else "MISSED"
        caption = (
            f"goal: at least {LEAST_ACCURACY:.0%} each, within "
            f"{100 * LARGEST_GAP:.1f} points of each other: {reached}"
        )
        if self.plot:
            caption += f"\nloss curves: {self.plot}"
        drawn = table.Table(
            *("policy", "test accuracy\nmean (range)", "final\nscale"),
            *("steps\nskipped", "seconds\nper run", "activations\nper batch"),
            box=box.SIMPLE_HEAD,
            caption=caption,
            caption_justify="left",
        )
        for policy in POLICIES:
            drawn.add_row(policy, *_cells(self.of(policy)))
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
    data = load()
    runs = []
    columns = progress.Progress.get_default_columns()
    shown = (*columns, progress.TextColumn("{task.fields[loss]}"))
    with progress.Progress(*shown, disable=quiet) as bar:
        steps = len(POLICIES) * seeds * epochs
        task = bar.add_task("training", total=steps, loss="")

        def tick(epoch: int, logs: dict[str, float]) -> None:
            bar.update(task, advance=1, loss=f"loss {logs['loss']:.4f}")

        ticks = [keras.callbacks.LambdaCallback(on_epoch_end=tick)]
        for policy in POLICIES:
            for seed in range(seeds):
                name = f"{policy}, seed {seed}"
                bar.update(task, description=name)
                runs.append(train(policy, seed, data, epochs, ticks))
                # Where the output is no terminal, the bar shows only its end.
                if not quiet:
                    bar.console.print(f"{name}: {runs[-1].accuracy:.2%}")
    report = Report(tuple(runs))
    path = plot(report, pathlib.Path(out)) if out is not None else None
    return dataclasses.replace(report, plot=path)


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
            float32_head.float32_output("softmax"),
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
    with current_policy.policy_scope(policy):
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
    )


def loss_scale_for(policy: str) -> Any:
    """Returns the loss scale a format needs: only float16 lacks range."""
    if policy == "mixed_float16":
        # Grows ten times faster than the default, to show in a short run how
        # the scale finds its ceiling by a skipped step.
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
    for policy, style in zip(POLICIES, ("-", "--", ":"), strict=True):
        losses = np.array([run.losses for run in report.of(policy)])
        epochs = np.arange(1, losses.shape[1] + 1)
        axes.plot(epochs, losses.mean(axis=0), style, marker="o", label=policy)
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
