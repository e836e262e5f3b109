"""LeNet-5 in 16 bit: by a level's name, and layer by layer by hand.

The network learns scikit-learn's scanned digits from each seed at the levels
O0 to O3, one call each, and once with every layer's dtype given by hand: the
last dense layer in float32, all others in float16, and a loss scale that is
fixed in advance and given to each step. O0 is float32, the others' twin.

    python examples/lenet.py --epochs=5 --seeds=3

takes about a minute on two cores, under TensorFlow or KERAS_BACKEND=jax.
"""

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfmix
from tfmix.examples import common, recipe

BATCH_SIZE, EPOCHS = 32, 5
LEVELS = ("O0", "O1", "O2", "O3")
BY_HAND = "by hand"
LEAST_ACCURACY = 0.93
# What the scale is in each epoch by hand; any schedule would do.
SCALES = (1024.0, 512.0)


class GivenLossScale(tfmix.LossScale):
    """A scale that stays what it was set to; bad steps are still skipped."""

    def init(self) -> tfmix.LossScaleState:
        """Returns the state before the first step."""
        return tfmix.LossScaleState(np.float32(SCALES[0]))

    def update(self, state: Any, finite: Any) -> tfmix.LossScaleState:
        """Returns the state as it is."""
        del finite
        return state


def build_model(body: Any = None, head: Any = None) -> keras.Model:
    """Builds LeNet-5 for 16 x 16 pixels.

    Args:
        body: Dtype policy of all layers but the last dense one. Defaults to
            `None`, the policy in force.
        head: Dtype policy of that one.

    Returns:
        The network; its outputs are logits.
    """
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.UpSampling2D(interpolation="bilinear", dtype=body),
            layers.Conv2D(6, 5, padding="same", activation="relu", dtype=body),
            layers.MaxPooling2D(dtype=body),
            layers.Conv2D(16, 5, padding="same", activation="relu", dtype=body),
            layers.MaxPooling2D(dtype=body),
            layers.Flatten(dtype=body),
            layers.Dense(120, activation="relu", dtype=body),
            layers.Dense(84, activation="relu", dtype=body),
            layers.Dense(10, dtype=head),
        ]
    )


def by_level(level: str, optimizer: Any) -> Any:
    """Prepares the network at a level; returns it with its optimizer."""
    model, optimizer, _ = tfmix.prepare(build_model(), optimizer, level=level)
    return model, optimizer


def by_hand(optimizer: Any) -> Any:
    """Gives each layer its dtype; returns the network and its optimizer."""
    model = build_model(body="mixed_float16", head="float32")
    optimizer = tfmix.LossScaleOptimizer(optimizer, loss_scale=GivenLossScale())
    return tfmix.guard(model), optimizer


class GiveScale(keras.callbacks.Callback):
    """Sets the loss scale of each step, before it."""

    def __init__(self, scale_of: Callable[[int], float]) -> None:
        super().__init__()
        self.scale_of, self.step = scale_of, 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the scale."""
        self.model.optimizer.loss_scale = self.scale_of(self.step)
        self.step += 1


def train(name: str, seed: int, epochs: int, tick: recipe.Ticker) -> common.Run:
    """Trains and tests one network."""
    train_x, test_x, train_y, test_y = common.digits(BATCH_SIZE, images=True)
    steps = epochs * len(train_x) // BATCH_SIZE
    decay = keras.optimizers.schedules.CosineDecay(0.004, steps)
    optimizer = keras.optimizers.Adam(decay)
    callbacks: list[keras.callbacks.Callback] = [recipe.Tick(tick)]
    if name == BY_HAND:
        model, optimizer = by_hand(optimizer)
        # Lower by half from the middle of the run on.
        callbacks.append(GiveScale(lambda step: SCALES[2 * step >= steps]))
    else:
        model, optimizer = by_level(name, optimizer)
    model.compile(
        optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        train_x,
        train_y,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
    )
    _, accuracy = model.evaluate(
        test_x, test_y, batch_size=len(test_x), verbose=0
    )
    return common.Run(
        variant=name,
        seed=seed,
        score=float(accuracy),
        twin="O0",
        losses=tuple(history.history["loss"]),
        columns=_columns(model, optimizer),
    )


def _columns(model: keras.Model, optimizer: Any) -> dict[str, Any]:
    kept = [one for one in model.layers if one.compute_dtype == "float32"]
    scale = getattr(optimizer, "loss_scale", 1.0)
    return {
        "float32\nlayers": f"{len(kept)} of {len(model.layers)}",
        "weights": model.layers[1].kernel.dtype,
        "skipped\nsteps": getattr(optimizer, "skipped_steps", 0),
        "final\nscale": f"2^{np.log2(scale):g}",
    }


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""
    return {
        **common.sound(runs, LEAST_ACCURACY),
        "by hand, one layer of nine computes in float32, and the scale is "
        "what the last step was given": all(
            run.columns["float32\nlayers"] == "1 of 9"
            and run.columns["final\nscale"] == f"2^{np.log2(SCALES[-1]):g}"
            for run in runs
            if run.variant == BY_HAND
        ),
    }


RECIPE = recipe.Recipe(
    __doc__,
    (*LEVELS, BY_HAND),
    train,
    claims,
    length=("epochs", EPOCHS, "Passes over the data."),
    picture=("lenet", "LeNet-5 on scanned digits"),
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false."""
    return RECIPE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
