"""Train a small transformer with its matrix products in float8.

It names the language of a text, as `languages.py` does, from its first step on
in float32, in mixed bfloat16, and with every Dense and every projection of
attention in float8, forward and backward. Beside the accuracy stand two
cosines, each of the layer where it is least: of one product in float8 with the
same in float32, as `tfmix.check` measures it, and of a kernel's gradient of the
training loss with that of the whole network in float32, through all layers
behind it.

    python examples/float8.py --steps=200 --seeds=3

runs under TensorFlow and KERAS_BACKEND=jax. A CPU computes float8 by casts:
this shows what it does to training, not its speed.
"""

import sys
from typing import Any

import keras
import numpy as np

import tfmix
from tfmix.examples import common, languages, recipe

STEPS, RATE = 200, 2e-3
# All that fit: by default only those too large for two cores would be chosen.
FLOAT8 = tfmix.Policy("mixed_float8", float8_layers=["Dense", "EinsumDense"])
POLICIES = {
    "float32": "float32",
    "mixed_bfloat16": "mixed_bfloat16",
    "mixed_float8": FLOAT8,
}
LEAST_ACCURACY, LEAST_COSINE = 0.7, 0.98
PRODUCT, WHOLE = "cosine of\na product", "cosine end\nto end"


def train(variant: str, seed: int, steps: int, tick: recipe.Ticker) -> Any:
    """Trains and tests one network."""
    data = languages.texts(languages.LANGUAGES)
    keras.utils.set_random_seed(seed)
    with tfmix.policy_scope(POLICIES[variant]):
        model = languages.build_model(len(languages.LANGUAGES))
        model.compile(
            keras.optimizers.Adam(RATE),
            loss="sparse_categorical_crossentropy",
            jit_compile=languages.compiled(),
        )
        losses = languages.fit(model, data, seed, steps, [recipe.Tick(tick)])
        outputs = keras.ops.convert_to_numpy(model(data[1]))
        found = gradients(model, data)
        rows = slice(0, 2 * languages.BATCH_SIZE)
        report = tfmix.check(model, data[0][rows], data[2][rows])
        products = [one.cosine for one in report.float8]
    with tfmix.policy_scope("float32"):
        exact = languages.build_model(len(languages.LANGUAGES))
        exact.set_weights(model.get_weights())
        expected = gradients(exact, data)
    return common.Run(
        variant=variant,
        seed=seed,
        score=float(np.mean(outputs.argmax(axis=-1) == data[3])),
        losses=tuple(losses),
        # As text, which is not added up over the seeds.
        columns={
            PRODUCT: f"{min(products, default=1.0):.4f}",
            WHOLE: f"{least_cosine(found, expected):.4f}",
        },
    )


def gradients(model: keras.Model, data: tuple[Any, ...]) -> list[np.ndarray]:
    """Returns the gradients of the loss on all training rows by the kernels."""
    x, y = data[0], data[2]
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        @tf.function
        def compute() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x))
            return tape.gradient(loss, [v.value for v in kernels])
    else:
        import jax

        places = {id(v): n for n, v in enumerate(model.trainable_variables)}
        values = [v.value for v in model.trainable_variables]
        rest = [v.value for v in model.non_trainable_variables]

        @jax.jit
        def compute() -> Any:
            def loss(trained: Any) -> Any:
                return loss_of(y, model.stateless_call(trained, rest, x)[0])

            every = jax.grad(loss)(values)
            return [every[places[id(v)]] for v in kernels]

    return [np.asarray(each, "float32") for each in compute()]


def least_cosine(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Returns the cosine of the pair of gradients that differs most."""
    return min(
        float(np.vdot(one, other))
        / float(np.linalg.norm(one) * np.linalg.norm(other))
        for one, other in zip(found, expected, strict=True)
    )


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""
    least = min(float(run.columns[PRODUCT]) for run in runs)
    return {
        **common.sound(runs, LEAST_ACCURACY),
        f"no product of a layer, forward or backward, turns further from "
        f"float32's than a cosine of {LEAST_COSINE} (least: {least})": least
        >= LEAST_COSINE,
    }


RECIPE = recipe.Recipe(
    __doc__,
    tuple(POLICIES),
    train,
    claims,
    length=("steps", STEPS, "Batches to train on."),
    picture=("float8", "float8: mean and band of the seeds"),
    ticks=lambda steps: max(1, steps // languages.STEPS_PER_TICK),
    axis=f"{languages.STEPS_PER_TICK} steps each",
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false."""
    return RECIPE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
