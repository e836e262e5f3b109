"""A training loop of one's own: fixed scale, dynamic scale, all in one.

The same network learns scikit-learn's scanned digits four times from each
seed: in float32, then with 16-bit compute under a fixed scale, under a dynamic
one, and with everything that belongs to an update in one optimizer: gradient
accumulation, weight decay, clipping of the true gradients, and a batch tried
again when it overflowed. (NNabla's tutorial on mixed precision trains so.)

Run it with `python examples/training_loop.py --epochs=8 --seeds=3` on
TensorFlow; it takes under a minute on two cores.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags
from rich import box, console, progress, table
from sklearn import datasets, model_selection

import tfmix

BATCH_SIZE, EPOCHS, SEEDS = 64, 8, 3
# From 2**24, the ceiling of a loss scale, to 1 are 24 halvings.
RETRIES = 24
# Five of the 540 test images; two seeds of one variant differ by as much.
LARGEST_GAP = 0.01


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train; settings of the optimizers, nothing else."""

    name: str
    policy: str
    rule: Any  # what `LossScaleOptimizer(loss_scale=...)` takes
    update: dict[str, Any] = dataclasses.field(default_factory=dict)
    retries: int = 0


VARIANTS = (
    Variant("float32", "float32", tfmix.NoLossScale()),
    Variant("fixed scale", "mixed_float16", 8.0),
    Variant("dynamic scale", "mixed_float16", "dynamic"),
    Variant(
        "all in one",
        "mixed_float16",
        # Far too high, to show that no batch is lost while it comes down.
        tfmix.DynamicLossScale(initial_scale=2.0**24),
        {
            "gradient_accumulation_steps": 2,
            "weight_decay": 1e-4,
            "global_clipnorm": 5.0,
        },
        RETRIES,
    ),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run came to."""

    variant: str
    seed: int
    accuracy: float  # share of the test images named correctly
    batches: int  # that were offered
    applied: int  # of these
    skipped_steps: int
    loss_scale: float


def make_step(model: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """Compiles one step: scale, differentiate, apply or skip."""
    import tensorflow as tf

    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        return optimizer.apply(grads, model.trainable_variables)

    return step


def train(
    variant: Variant,
    seed: int,
    data: tuple[Any, ...],
    epochs: int,
    tick: Callable[[], None],
) -> Run:
    """Trains and tests one network; `tick` is called after each epoch."""
    train_x, test_x, train_y, test_y = data
    keras.utils.set_random_seed(seed)
    with tfmix.policy_scope(variant.policy):
        model = build_model()
    rate = 0.1 * variant.update.get("gradient_accumulation_steps", 1)
    inner = keras.optimizers.SGD(rate, momentum=0.9, **variant.update)
    optimizer = tfmix.LossScaleOptimizer(inner, loss_scale=variant.rule)
    optimizer.build(model.trainable_variables)
    step = make_step(model, optimizer)
    shuffled = np.random.default_rng(seed)
    batches = applied = 0
    for _ in range(epochs):
        order = shuffled.permutation(len(train_x))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            tries = 1 + variant.retries
            batches += 1
            # `any` stops at the first try that is applied.
            applied += any(
                bool(step(train_x[rows], train_y[rows])) for _ in range(tries)
            )
        optimizer.check_health()
        tick()
    outputs = keras.ops.convert_to_numpy(model(test_x))
    return Run(
        variant=variant.name,
        seed=seed,
        accuracy=float(np.mean(outputs.argmax(axis=-1) == test_y)),
        batches=batches,
        applied=applied,
        skipped_steps=optimizer.skipped_steps,
        loss_scale=optimizer.loss_scale,
    )


def build_model() -> keras.Model:
    """Builds the network under the policy that is in force."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
            tfmix.float32_output("softmax"),
        ]
    )


def load() -> tuple[Any, ...]:
    """Returns training images, test images, and the labels of both."""
    digits = datasets.load_digits()
    return tuple(
        model_selection.train_test_split(
            (digits.data / 16.0).astype("float32"),
            digits.target,
            test_size=0.3,
            stratify=digits.target,
            random_state=0,
        )
    )


def run(
    epochs: int = EPOCHS, seeds: int = SEEDS, quiet: bool = False
) -> list[Run]:
    """Trains every variant from every seed.

    Args:
        epochs: Passes over the data.
        seeds: Runs of each variant.
        quiet: Whether to leave out the progress bar.

    Returns:
        All runs.

    Raises:
        RuntimeError: If Keras does not run on TensorFlow.
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "This loop uses tf.GradientTape. Received: Keras's backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow; "
            "docs/loss-scaling.md has the same loop for JAX."
        )
    data = load()
    runs = []
    with progress.Progress(disable=quiet) as bar:
        task = bar.add_task("training", total=len(VARIANTS) * seeds * epochs)
        for variant in VARIANTS:
            for seed in range(seeds):
                bar.update(task, description=f"{variant.name}, seed {seed}")
                runs.append(
                    train(
                        variant, seed, data, epochs, lambda: bar.advance(task)
                    )
                )
    return runs


def gap(runs: list[Run]) -> float:
    """Returns the largest distance of a mean accuracy to float32's."""
    means = {
        variant.name: np.mean(
            [run.accuracy for run in runs if run.variant == variant.name]
        )
        for variant in VARIANTS
    }
    return float(max(abs(mean - means["float32"]) for mean in means.values()))


def drawn(runs: list[Run]) -> table.Table:
    """Returns the comparison, one row per variant, for rich to print."""
    rows = table.Table(
        *("variant", "test accuracy\nmean (range)", "batches", "applied"),
        *("skipped\nsteps", "final scale"),
        box=box.SIMPLE_HEAD,
        caption=f"largest distance to float32: {gap(runs):.2%}",
    )
    for variant in VARIANTS:
        own = [run for run in runs if run.variant == variant.name]
        accuracy = [run.accuracy for run in own]
        rows.add_row(
            variant.name,
            f"{np.mean(accuracy):.2%}\n({min(accuracy):.2%} - "
            f"{max(accuracy):.2%})",
            str(sum(run.batches for run in own)),
            str(sum(run.applied for run in own)),
            str(sum(run.skipped_steps for run in own)),
            ", ".join(sorted({f"{run.loss_scale:g}" for run in own})),
        )
    return rows


def main() -> int:
    """Prints the comparison; returns 1 if 16 bit learns less than float32."""
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "epochs", EPOCHS, "Passes over the data.", 1, flag_values=values
    )
    flags.DEFINE_integer(
        "seeds", SEEDS, "Runs of each variant.", 1, flag_values=values
    )
    values(sys.argv)
    runs = run(values.epochs, values.seeds)
    console.Console().print(drawn(runs))
    return int(gap(runs) > LARGEST_GAP)


if __name__ == "__main__":
    sys.exit(main())
