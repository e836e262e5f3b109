"""The script that runs unchanged on a TPU: bfloat16, no scale, tiles of 128.

bfloat16 has float32's range, so no loss scale is needed; a TPU multiplies
tiles of 128 x 128, so every size is a multiple of that; and `DataParallel`
shares each batch between all devices there are. The data are scikit-learn's
scanned digits: 64 pixels filled up to 128, ten classes to 128.

    python examples/tpu.py --epochs=20 --seeds=3

takes a minute on two cores. Without a TPU, the same on eight pretended devices:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/tpu.py
"""

import functools
import os
import sys
from typing import Any

# Before Keras is imported, which reads it once.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import tfmix
from tfmix.examples import common, digits, recipe

# The tile of a TPU's matrix unit.
TILE = 128
INPUTS, HIDDEN, CLASSES = TILE, 2 * TILE, TILE
# 128 rows for each of eight devices.
BATCH_SIZE = 8 * TILE
EPOCHS = 20
VARIANTS = ("float32", "mixed_bfloat16")
LEAST_ACCURACY = 0.95


def build_model() -> keras.Model:
    """Builds the network under the policy that is in force."""
    return keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(HIDDEN, activation="relu"),
            # There is no label above 9: the rest learns never to be it.
            keras.layers.Dense(CLASSES),
            tfmix.float32_output("softmax"),
        ]
    )


@functools.cache
def load() -> tuple[np.ndarray, ...]:
    """Returns training inputs, test inputs and the labels of both.

    The inputs are filled up with zeros. Each training image is there five
    times, moved by half a pixel each way, and as often as makes whole batches.
    """
    train_x, test_x, train_y, test_y = common.digits(images=True)
    moved, labels = digits.with_half_shifts(train_x), np.tile(train_y, 5)
    rows = len(labels) // BATCH_SIZE * BATCH_SIZE
    return filled(moved)[:rows], filled(test_x), labels[:rows], test_y


def filled(images: np.ndarray) -> np.ndarray:
    """Flattens images, and adds zeros up to `INPUTS` columns."""
    flat = images.reshape(len(images), -1)
    return np.pad(flat, ((0, 0), (0, INPUTS - flat.shape[1])))


def train(
    policy: str, seed: int, epochs: int, tick: recipe.Ticker
) -> common.Run:
    """Trains and tests one network on all devices."""
    train_x, test_x, train_y, test_y = load()
    with tfmix.policy_scope(policy):
        model = build_model()
        model.compile(
            keras.optimizers.Adam(2e-3), loss="sparse_categorical_crossentropy"
        )
        history = model.fit(
            train_x,
            train_y,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            callbacks=[recipe.Tick(tick)],
            verbose=0,
        )
    outputs = keras.ops.convert_to_numpy(model(test_x))
    return common.Run(
        variant=policy,
        seed=seed,
        score=float(np.mean(outputs.argmax(axis=-1) == test_y)),
        losses=tuple(float(loss) for loss in history.history["loss"]),
        columns={
            "loss scale": f"{getattr(model.optimizer, 'loss_scale', 1.0):g}",
            "computes in": model.layers[0].compute_dtype,
            "devices": str(len(devices_of(model.layers[0].kernel))),
        },
    )


def devices_of(variable: Any) -> set[Any]:
    """Returns the devices that hold a variable."""
    return set(variable.value.sharding.device_set)


def claims(runs: tuple[common.Run, ...]) -> dict[str, bool]:
    """Returns what the example says, and whether it came true."""
    devices = len(keras.distribution.list_devices())
    with tfmix.policy_scope("mixed_bfloat16"):
        advice = tfmix.advise(build_model(), BATCH_SIZE)
    return {
        **common.sound(runs, LEAST_ACCURACY),
        "no loss is scaled": all(
            run.columns["loss scale"] == "1" for run in runs
        ),
        f"all products see multiples of {TILE}, and all run in bfloat16": (
            all(row.aligned_tpu for row in advice.rows)
            and advice.share_16bit == 1.0
        ),
        f"the variables are on {devices} device(s), all there are": all(
            run.columns["devices"] == str(devices) for run in runs
        ),
    }


RECIPE = recipe.Recipe(
    __doc__,
    VARIANTS,
    train,
    claims,
    length=("epochs", EPOCHS, "Passes over the data."),
    picture=("tpu", "Digits on many devices"),
)


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if a claim is false.

    Raises:
        RuntimeError: If Keras does not run on JAX.
    """
    if keras.backend.backend() != "jax":
        raise RuntimeError(
            "Keras trains on TPUs under JAX. Received: Keras's backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=jax."
        )
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        return RECIPE.main(argv)
    finally:
        keras.distribution.set_distribution(before)


if __name__ == "__main__":
    sys.exit(main())
