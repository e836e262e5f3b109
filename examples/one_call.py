"""A trained model into 16 bit by one call, and back by another.

A network that was compiled and trained in float32 goes on in mixed float16,
with the settings such a call has elsewhere: the loss scale, whether it moves,
after how many steps it grows, how gradients are clipped, and masters in one
flat vector. Then it comes back, and its optimizer goes on where it was. The
twin stays in float32 all the time.

    python examples/one_call.py --epochs=3 --seeds=3

takes about a minute on two cores, under TensorFlow or KERAS_BACKEND=jax.
"""

import dataclasses
import sys
from typing import Any

import keras

import tfmix
from tfmix.conversion import optimizer_state
from tfmix.examples import common, recipe

BATCH_SIZE, EPOCHS = 64, 3  # epochs of each of three stages
LEAST_ACCURACY = 0.95
# The calls: what `to_float16` is given beside the model.
CALLS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "as it comes": {},
    "fixed, clipped": {"dynamic": False, "clip": 1.0},
    "flat masters": {"max_noskip": 40, "flat_master": True},
}


@dataclasses.dataclass(frozen=True)
class Way:
    """The way back from `to_float16`."""

    report: Any
    optimizer: Any
    clip: float | None

    def to_float32(self) -> None:
        """Undoes it; what was trained and the optimizer's state stay."""
        self.report.undo()
        self.optimizer.global_clipnorm = self.clip


def to_float16(  # noqa: PLR0913 - the settings that fastai's call has
    model: keras.Model,
    loss_scale: float | None = None,
    max_noskip: int = 1000,
    dynamic: bool = True,
    clip: float | None = None,
    flat_master: bool = False,
    max_scale: float = 2.0**24,
) -> Way:
    """Converts a compiled model and its optimizer, in place.

    Args:
        model: A compiled Keras model, trained or not.
        loss_scale: The first scale, or the only one. Defaults to `None`:
            2**16, or 512 if it does not move.
        max_noskip: Good steps in a row before the scale doubles.
        dynamic: Whether the scale moves.
        clip: The largest norm of all gradients together; `None` for any.
        flat_master: Whether the variables are 16-bit, too, and all of them
            updated in one float32 vector.
        max_scale: Where the scale stops growing.

    Returns:
        The way back.
    """
    optimizer = model.optimizer
    rule: Any = float(loss_scale or 512.0)
    if dynamic:
        rule = tfmix.DynamicLossScale(
            initial_scale=loss_scale or 2.0**16,
            growth_steps=max_noskip,
            max_scale=max_scale,
        )
    before = optimizer.global_clipnorm
    optimizer.global_clipnorm = clip
    state, inner = optimizer_state.take(model), optimizer
    if flat_master:
        # Masters want an optimizer that is not built yet.
        fresh = type(optimizer).from_config(optimizer.get_config())
        inner = tfmix.MasterWeightOptimizer(fresh, flat=True)
    scaled = tfmix.LossScaleOptimizer(inner, loss_scale=rule)
    policy = "float16" if flat_master else "mixed_float16"
    _, _, report = tfmix.prepare(model, scaled, policy)
    optimizer_state.give(model, state)
    return Way(report, optimizer, before)


def build_model() -> keras.Model:
    """Builds and compiles the network in float32."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(96, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.002),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def train(name: str, seed: int, epochs: int, tick: recipe.Ticker) -> common.Run:
    """Trains in float32, in 16 bit and in float32 again; then tests."""
    train_x, test_x, train_y, test_y = common.digits(BATCH_SIZE)
    losses: list[float] = []

    def fit() -> None:
        history = model.fit(
            train_x,
            train_y,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            verbose=0,
            callbacks=[recipe.Tick(tick)],
        )
        losses.extend(history.history["loss"])

    model = build_model()
    optimizer, settings = model.optimizer, CALLS[name]
    fit()
    columns = {"weights,\nthen": "float32", "skipped\nsteps": 0}
    way = None if settings is None else to_float16(model, **settings)
    fit()
    if way is not None:
        columns = _columns(model)
        way.to_float32()
    fit()
    _, accuracy = model.evaluate(
        test_x, test_y, batch_size=len(test_x), verbose=0
    )
    steps = int(optimizer.iterations.numpy())
    columns["optimizer\nwent on"] = str(
        model.optimizer is optimizer
        and steps + columns["skipped\nsteps"]
        == 3 * epochs * len(train_x) // BATCH_SIZE
    )
    return common.Run(
        name, seed, float(accuracy), losses=tuple(losses), columns=columns
    )


def _columns(model: keras.Model) -> dict[str, Any]:
    return {
        "weights,\nthen": model.layers[0].kernel.dtype,
        "skipped\nsteps": model.optimizer.skipped_steps,
        "scale\nby then": f"{model.optimizer.loss_scale:g}",
    }


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""
    return {
        **common.sound(runs, LEAST_ACCURACY),
        "back in float32, the first optimizer went on with every step that "
        "was taken": all(
            run.columns["optimizer\nwent on"] == "True" for run in runs
        ),
    }


RECIPE = recipe.Recipe(
    __doc__,
    list(CALLS),
    train,
    claims,
    length=("epochs", EPOCHS, "Passes in each of three stages."),
    picture=("one_call", "Float32, then 16 bit, then float32 again"),
    ticks=lambda epochs: 3 * epochs,
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false."""
    return RECIPE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
