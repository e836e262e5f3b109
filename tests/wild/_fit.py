"""The data and `fit` of scripts that differ in a layer or a step."""

import keras
import numpy as np
from keras import layers


def rows(*first, jit):
    """Fits the layers to rows of numbers, by their sums."""
    model = keras.Sequential([*first, layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=jit)
    return losses(model, *numbers())


def tokens(*first, jit):
    """Fits the layers to sequences of 8 tokens, of two classes."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, (64, 8)), rng.integers(0, 2, 64)
    model = keras.Sequential([*first, layers.Dense(1, activation="sigmoid")])
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return losses(model, x, y)


def images(*first, jit):
    """Fits the layers to small images of three classes."""
    rng = np.random.default_rng(0)
    x, y = rng.random((64, 8, 8, 3), "float32"), rng.integers(0, 3, 64)
    model = keras.Sequential([*first, layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return losses(model, x, y)


def numbers():
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    return x, x.sum(1, keepdims=True)


def losses(model, *data, name="loss"):
    """Returns the losses of four epochs."""
    fitted = model.fit(*data, batch_size=16, epochs=4, verbose=0)
    return fitted.history[name]
