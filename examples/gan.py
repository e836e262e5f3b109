"""Two networks that train each other, in 16 bit: scales of their own, or one.

A generator draws digits it is asked for; a critic tells them from scanned
ones. In mixed float16 each optimizer has its loss scale, or both share one,
from a start far too high. The score is the share of drawn digits that the
nearest scanned ones say are what was asked for; float32 is the twin.

    python examples/gan.py --steps=500 --seeds=3

takes about a minute on two cores, under TensorFlow or KERAS_BACKEND=jax.
"""

import sys
from typing import Any

import keras
import numpy as np
from sklearn import neighbors

import tfmix
from tfmix.examples import common, recipe

BATCH_SIZE, STEPS, NOISE = 64, 500, 16
TICKS = 10
# Asked for one of ten at random, one in ten would be right by chance.
LEAST_SCORE = 0.6
VARIANTS = ("float32", "scales of their own", "one scale")
START = tfmix.DynamicLossScale(initial_scale=2.0**24)


def build_generator() -> keras.Model:
    """Builds what makes 8 x 8 pixels of noise and a digit."""
    layers = keras.layers
    noise, digit = keras.Input((NOISE,)), keras.Input((10,))
    x = layers.Concatenate()([noise, digit])
    x = layers.Dense(128)(x)
    x = layers.BatchNormalization()(x)
    x = layers.LeakyReLU(negative_slope=0.2)(x)
    x = layers.Dense(64)(x)
    pixels = tfmix.float32_output("sigmoid")(x)
    return keras.Model([noise, digit], pixels, name="generator")


def build_critic() -> keras.Model:
    """Builds what says whether pixels are a scan of a digit."""
    layers = keras.layers
    pixels, digit = keras.Input((64,)), keras.Input((10,))
    x = layers.Concatenate()([pixels, digit])
    x = layers.Dense(128)(x)
    x = layers.LeakyReLU(negative_slope=0.2)(x)
    x = layers.Dropout(0.3)(x)
    x = layers.Dense(64)(x)
    x = layers.LeakyReLU(negative_slope=0.2)(x)
    x = layers.Dense(1)(x)
    return keras.Model(
        [pixels, digit], tfmix.float32_output()(x), name="critic"
    )


def optimizers(variant: str) -> tuple[Any, Any]:
    """Returns the optimizers of the critic and of the generator."""
    inner = [keras.optimizers.Adam(1e-3, beta_1=0.5) for _ in range(2)]
    if variant == "float32":
        return inner[0], inner[1]
    critic = tfmix.LossScaleOptimizer(inner[0], loss_scale=START)
    scale = critic if variant == "one scale" else START
    return critic, tfmix.LossScaleOptimizer(inner[1], loss_scale=scale)


class Pair:
    """A generator and a critic that train in turn.

    Args:
        variant: One of `VARIANTS`.
    """

    def __init__(self, variant: str) -> None:
        half = variant != "float32"
        with tfmix.policy_scope("mixed_float16" if half else "float32"):
            self.generator, self.critic = build_generator(), build_critic()
            noise, digit = self.generator.inputs
            judged = self.critic([self.generator([noise, digit]), digit])
            self.both = keras.Model([noise, digit], judged)
            loss = keras.losses.BinaryCrossentropy(from_logits=True)
            own, other = optimizers(variant)
            # `compile` guards the models: the statistics of a skipped step
            # are put back, too.
            self.critic.compile(own, loss=loss)
            self.both.compile(other, loss=loss)

    def step(self, pixels: np.ndarray, digit: np.ndarray, random: Any) -> float:
        """Trains the critic, then the generator; returns the latter's loss."""
        count = len(pixels)
        noise = random.normal(size=(count, NOISE)).astype("float32")
        drawn = self.generator.predict_on_batch([noise, digit])
        # Scans are 0.9, not 1: a critic that is never sure teaches more.
        truth = np.repeat([0.9, 0.0], count).astype("float32")[:, None]
        self.critic.trainable = True
        self.critic.train_on_batch(
            [np.concatenate([pixels, drawn]), np.concatenate([digit, digit])],
            truth,
        )
        self.critic.trainable = False
        noise = random.normal(size=(count, NOISE)).astype("float32")
        wanted = np.ones((count, 1), "float32")
        return float(self.both.train_on_batch([noise, digit], wanted))

    def draw(self, digits: np.ndarray, random: Any) -> np.ndarray:
        """Draws digits."""
        noise = random.normal(size=(len(digits), NOISE)).astype("float32")
        return self.generator.predict_on_batch([noise, one_hot(digits)])


def one_hot(digits: np.ndarray) -> np.ndarray:
    """Returns each digit as ten numbers."""
    return np.eye(10, dtype="float32")[digits]


def train(name: str, seed: int, steps: int, tick: recipe.Ticker) -> common.Run:
    """Trains a pair and lets the nearest scanned digits read what it draws."""
    inputs, _, labels, _ = common.digits()
    random = np.random.default_rng(seed)
    pair, losses = Pair(name), []
    for step in range(steps):
        rows = random.integers(0, len(inputs), BATCH_SIZE)
        digit = one_hot(labels[rows])
        losses.append(pair.step(inputs[rows], digit, random))
        # Each tenth of the run, so that the bar is full in the end.
        if step * TICKS // steps < (step + 1) * TICKS // steps:
            tick(losses[-1])
    asked = np.arange(500) % 10
    drawn = pair.draw(asked, random)
    judge = neighbors.KNeighborsClassifier(3).fit(inputs, labels)
    return common.Run(
        variant=name,
        seed=seed,
        score=float(judge.score(drawn, asked)),
        losses=tuple(
            np.array_split(losses, TICKS)[n].mean() for n in range(TICKS)
        ),
        columns=_columns(pair),
    )


def _columns(pair: Pair) -> dict[str, Any]:
    critic, other = pair.critic.optimizer, pair.both.optimizer
    if not hasattr(critic, "loss_scale"):
        return {}
    weights = pair.critic.get_weights() + pair.generator.get_weights()
    return {
        "critic\nskips": critic.skipped_steps,
        "generator\nskips": other.skipped_steps,
        "scales": f"2^{np.log2(critic.loss_scale):g}, "
        f"2^{np.log2(other.loss_scale):g}",
        "finite": str(all(np.isfinite(one).all() for one in weights)),
    }


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""
    halves = [run for run in runs if run.columns]
    return {
        **common.sound(runs, LEAST_SCORE),
        "the first scale overflowed, and no weight was hurt": all(
            run.columns["critic\nskips"] > 0 and run.columns["finite"] == "True"
            for run in halves
        ),
    }


RECIPE = recipe.Recipe(
    __doc__,
    VARIANTS,
    train,
    claims,
    length=("steps", STEPS, "Turns of both networks."),
    picture=("gan", "The generator's loss"),
    unit="read as asked",
    ticks=lambda steps: TICKS,
    axis="tenth of the run",
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false."""
    return RECIPE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
