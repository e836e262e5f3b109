"""Three lines into mixed precision: the policy, the softmax, the optimizer.

A network for scikit-learn's scanned digits, written as for float32 but for
three lines, marked below. Under `float32` they change nothing, so the twin is
the very same script. (TensorFlow's articles on mixed precision begin so.)

    python examples/three_lines.py --epochs=8 --seeds=3

takes half a minute on two cores, under TensorFlow or KERAS_BACKEND=jax.
"""

import sys

import keras

import tfmix
from tfmix.examples import common, recipe

BATCH_SIZE, EPOCHS = 64, 8
VARIANTS = ("float32", "mixed_float16", "mixed_bfloat16")
LEAST_ACCURACY = 0.9


def build_model(policy: str) -> tuple[keras.Model, keras.Optimizer]:
    """Builds and compiles the network; returns its optimizer, too."""
    tfmix.set_global_policy(policy)  # the first line
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
            tfmix.float32_output("softmax"),  # the second
        ]
    )
    optimizer = keras.optimizers.Adam(2e-3)
    if policy == "mixed_float16":
        # Of bfloat16, `compile` alone looks after steps that are not finite.
        optimizer = tfmix.LossScaleOptimizer(optimizer)  # the third
    model.compile(
        optimizer,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model, model.optimizer


def dtypes_of(model: keras.Model) -> tuple[str, str, str]:
    """Returns the dtypes of a hidden layer, its variables and the output."""
    hidden, output = model.layers[0], model.layers[-1]
    return hidden.compute_dtype, hidden.kernel.dtype, output.compute_dtype


def train(
    policy: str, seed: int, epochs: int, tick: recipe.Ticker
) -> common.Run:
    """Trains and tests one network."""
    before = tfmix.global_policy()
    train_x, test_x, train_y, test_y = common.digits(BATCH_SIZE)
    try:
        model, optimizer = build_model(policy)
    finally:
        # Only for the next run's sake: a script sets its policy once.
        tfmix.set_global_policy(before)
    history = model.fit(
        train_x,
        train_y,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        callbacks=[recipe.Tick(tick)],
        verbose=0,
    )
    _, accuracy = model.evaluate(
        test_x, test_y, batch_size=len(test_x), verbose=0
    )
    return common.Run(
        variant=policy,
        seed=seed,
        score=float(accuracy),
        losses=tuple(float(loss) for loss in history.history["loss"]),
        columns={
            "hidden layer,\nits variables,\noutput": "\n".join(
                dtypes_of(model)
            ),
            "skipped\nsteps": getattr(optimizer, "skipped_steps", 0),
        },
    )


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""
    return {
        **common.sound(runs, LEAST_ACCURACY),
        "hidden layers compute in 16 bit, variables and outputs are float32": (
            all(
                run.columns["hidden layer,\nits variables,\noutput"]
                == f"{run.variant.split('_')[-1]}\nfloat32\nfloat32"
                for run in runs
            )
        ),
    }


RECIPE = recipe.Recipe(
    __doc__,
    VARIANTS,
    train,
    claims,
    length=("epochs", EPOCHS, "Passes over the data."),
    picture=("three_lines", "Digits: three lines into mixed precision"),
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false."""
    return RECIPE.main(argv)


if __name__ == "__main__":
    sys.exit(main())
