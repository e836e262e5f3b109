"""Fine-tune a small transformer to name the language of a text.

The texts are the translation catalogues that Django ships, read byte by byte.
The network first learns, in float32, to tell eight languages of northern
Europe apart; then its body is fine-tuned, with a new head, on eight others,
once in float32 and once in mixed float16, on the same batches. Drawn over each
other, the two trajectories are one line. (TensorFlow's mixed-precision
articles take the same three steps; `three_lines.py` shows them alone.)

    python examples/languages.py --steps=120 --seeds=3

takes a minute on two cores, under TensorFlow or KERAS_BACKEND=jax.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import tfmix
from tfmix.examples import catalogues, common, recipe

BEFORE = ("da", "sv", "nb", "nl", "de", "fi", "et", "hu")
LANGUAGES = ("es", "pt", "it", "ro", "fr", "pl", "cs", "tr")
# Multiples of 8, as Tensor Cores want them: bytes of a text, channels, heads.
LENGTH, CHANNELS, HEADS, BLOCKS, BATCH_SIZE = 48, 32, 4, 2, 64
# 256 bytes and the padding, filled up to a multiple of 8.
TOKENS = 264
PRETRAINING_STEPS, STEPS = 160, 120
RATE = 2e-3
STEPS_PER_TICK = 10
VARIANTS = ("float32", "mixed_float16")
# One guess in eight is right.
LEAST_ACCURACY = 0.7


@keras.saving.register_keras_serializable(package="tfmix.examples")
class Positions(keras.layers.Layer):
    """Adds to each token what is learnt about its place."""

    def build(self, input_shape: tuple[Any, ...]) -> None:
        """Makes the table, one row per place."""
        self.table = self.add_weight(
            name="table", shape=input_shape[1:], initializer="uniform"
        )

    def call(self, inputs: Any) -> Any:
        """Adds the table."""
        return inputs + self.table


def build_model(languages: int) -> keras.Model:
    """Builds the transformer under the policy that is in force."""
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    known = keras.ops.not_equal(tokens, 0)
    x = Positions()(layers.Embedding(TOKENS, CHANNELS)(tokens))
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        attend = layers.MultiHeadAttention(HEADS, CHANNELS // HEADS)
        x = x + attend(y, y, attention_mask=known[:, None, :])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * CHANNELS, activation="gelu")(y)
        x = x + layers.Dense(CHANNELS)(y)
    x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x, mask=known)
    x = layers.Dense(languages)(x)
    return keras.Model(tokens, tfmix.float32_output("softmax")(x))


def compiled() -> bool:
    """Says whether XLA should compile; JAX needs it to be fast.

    TensorFlow does without: so short a run does not win back the time.
    """
    return keras.backend.backend() == "jax"


def batches(
    x: np.ndarray, y: np.ndarray, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields random batches for ever, the same ones for the same seed."""
    random = np.random.default_rng(seed)
    while True:
        rows = random.integers(0, len(x), BATCH_SIZE)
        yield x[rows], y[rows]


def fit(
    model: keras.Model,
    data: tuple[np.ndarray, ...],
    seed: int,
    steps: int,
    callbacks: list[keras.callbacks.Callback],
) -> list[float]:
    """Trains a compiled model; returns the loss of each ten steps."""
    history = model.fit(
        batches(data[0], data[2], seed),
        steps_per_epoch=min(steps, STEPS_PER_TICK),
        epochs=max(1, steps // STEPS_PER_TICK),
        shuffle=False,  # They are drawn at random already.
        callbacks=callbacks,
        verbose=0,
    )
    return [float(loss) for loss in history.history["loss"]]


@functools.cache
def texts(languages: tuple[str, ...]) -> tuple[np.ndarray, ...]:
    """Returns the texts of some languages, read once."""
    return catalogues.load(languages, LENGTH)


@functools.cache
def pretrained() -> list[np.ndarray]:
    """Trains on the northern languages; returns the body's weights."""
    print(f"learning {', '.join(BEFORE)} first ...", flush=True)
    keras.utils.set_random_seed(0)
    with tfmix.policy_scope("float32"):
        model = build_model(len(BEFORE))
        model.compile(
            keras.optimizers.Adam(RATE),
            loss="sparse_categorical_crossentropy",
            jit_compile=compiled(),
        )
        fit(model, texts(BEFORE), 0, PRETRAINING_STEPS, [])
    # The head's kernel and bias are the last two.
    return model.get_weights()[:-2]


def train(
    policy: str, seed: int, steps: int, tick: recipe.Ticker
) -> common.Run:
    """Fine-tunes and tests one network."""
    body, data = pretrained(), texts(LANGUAGES)
    keras.utils.set_random_seed(seed)
    with tfmix.policy_scope(policy):
        model = build_model(len(LANGUAGES))
        model.set_weights([*body, *model.get_weights()[-2:]])
        optimizer = keras.optimizers.Adam(RATE)
        if policy == "mixed_float16":
            # `compile` would do the same.
            optimizer = tfmix.LossScaleOptimizer(optimizer)
        model.compile(
            optimizer,
            loss="sparse_categorical_crossentropy",
            jit_compile=compiled(),
        )
        losses = fit(model, data, seed, steps, [recipe.Tick(tick)])
        outputs = keras.ops.convert_to_numpy(model(data[1]))
        advice = tfmix.advise(model, BATCH_SIZE)
    memory = advice.memory[policy]
    return common.Run(
        variant=policy,
        seed=seed,
        score=float(np.mean(outputs.argmax(axis=-1) == data[3])),
        losses=tuple(losses),
        columns={
            "in 16\nbit": f"{advice.share_16bit:.0%}",
            "skips": getattr(optimizer, "skipped_steps", 0),
            "KiB of\nweights,\nslots": f"{memory.weights >> 10}, "
            f"{memory.slots >> 10}",
            "activa-\ntions": f"{memory.activations >> 10}",
        },
    )


def distances(runs: tuple[common.Run, ...]) -> tuple[float, float]:
    """Compares trajectories: mixed and float32, and one seed and the next.

    Returns:
        The mean distance of the losses of twins, and of neighbouring seeds of
        float32 (infinity with one seed).
    """
    curves = {
        policy: np.array([r.losses for r in runs if r.variant == policy])
        for policy in VARIANTS
    }
    plain, mixed = curves["float32"], curves["mixed_float16"]
    twins = float(np.abs(plain - mixed).mean())
    if len(plain) == 1:
        return twins, float("inf")
    return twins, float(np.abs(np.diff(plain, axis=0)).mean())


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""
    twins, seeds = distances(runs)

    def activations(policy: str) -> float:
        found = next(run for run in runs if run.variant == policy)
        return float(found.columns["activa-\ntions"])

    return {
        **common.sound(runs, LEAST_ACCURACY),
        f"the trajectories of twins are {twins:.4f} apart, those of two seeds "
        f"{seeds:.4f}": twins < seeds / 2,
        "activations take less than 0.6 of float32's memory": (
            activations("mixed_float16") < 0.6 * activations("float32")
        ),
    }


RECIPE = recipe.Recipe(
    __doc__,
    VARIANTS,
    train,
    claims,
    length=("steps", STEPS, "Batches to fine-tune on."),
    picture=("languages", "Languages: mean and band of the seeds"),
    ticks=lambda steps: max(1, steps // STEPS_PER_TICK),
    axis=f"{STEPS_PER_TICK} steps each",
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false."""
    return RECIPE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
