"""A benchmark task: handwritten digits (scikit-learn), by a small dense net."""

import functools
from typing import Any

import keras
import numpy as np

EPOCHS = 20
# The last images are for the test.
_TEST = 360


@functools.cache
def images() -> tuple[np.ndarray, np.ndarray]:
    """Returns all images, as `(images, 64)` from 0 to 1, and their digits."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    return (x / 16.0).astype("float32"), y


def build_model(policy: str) -> keras.Model:
    """Builds the net, whose dense layers have a policy."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", dtype=policy),
            keras.layers.Dense(10, dtype=policy),
            keras.layers.Activation("softmax", dtype="float32"),
        ]
    )


def train(
    optimizer: Any,
    seed: int,
    policy: str = "float32",
    wraps: bool = True,
    **settings: Any,
) -> tuple[keras.Model, float]:
    """Trains a net; returns it and its accuracy in percent."""
    x, y = images()
    keras.utils.set_random_seed(seed)
    model = build_model(policy)
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss=loss, **settings)
    if not wraps:
        # `compile` wraps the optimizer under a 16-bit policy.
        model.optimizer = optimizer
    model.fit(x[:-_TEST], y[:-_TEST], batch_size=32, epochs=EPOCHS, verbose=0)
    predicted = model.predict(x[-_TEST:], verbose=0).argmax(axis=-1)
    return model, 100.0 * float(np.mean(predicted == y[-_TEST:]))
