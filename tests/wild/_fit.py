"""The data and `fit` of scripts that differ in a layer or a step."""

import keras
import numpy as np
from keras import layers


def dense():
    return layers.Dense(16, activation="relu")


def conv():
    return layers.Conv2D(8, 3, padding="same")


def embed():
    return layers.Embedding(20, 16)


def pool(axes):
    return getattr(layers, f"GlobalAveragePooling{axes}D")()


def rows(jit, *first):
    """Fits the layers to rows of numbers, by their sums."""
    model = keras.Sequential([*first, layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=jit)
    return losses(model, *numbers())


def series(jit, shape, *first):
    """Fits the layers to series of numbers, by their sums."""
    x = np.random.default_rng(0).normal(size=(64, *shape)).astype("float32")
    model = keras.Sequential([*first, layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=jit)
    return losses(model, x, x.sum((1, 2))[:, None])


def tokens(jit, *first):
    """Fits the layers to sequences of 8 tokens, of two classes."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, (64, 8)), rng.integers(0, 2, 64)
    model = keras.Sequential([*first, layers.Dense(1, activation="sigmoid")])
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return losses(model, x, y)


def images(jit, *first):
    """Fits the layers to small images of three classes."""
    rng = np.random.default_rng(0)
    x, y = rng.random((64, 8, 8, 3), "float32"), rng.integers(0, 3, 64)
    model = keras.Sequential([*first, layers.Dense(3, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return losses(model, x, y)


def numbers(count=64):
    x = np.random.default_rng(0).normal(size=(count, 8)).astype("float32")
    return x, x.sum(1, keepdims=True)


def losses(model, *data, name="loss", batch_size=16, epochs=4):
    """Returns the losses of the epochs."""
    how = {"batch_size": batch_size, "epochs": epochs, "verbose": 0}
    return model.fit(*data, **how).history[name]


def text():
    """Returns a small language model, and 24 batches of lines of 65 words."""
    from sklearn import datasets

    loaders = "digits iris wine breast_cancer diabetes".split()
    texts = [getattr(datasets, f"load_{name}")().DESCR for name in loaders]
    words = " ".join(texts).split()
    vocabulary, ids = np.unique(words, return_inverse=True)
    starts = np.random.default_rng(0).integers(0, len(ids) - 65, 32 * 24)
    lines = np.stack([ids[i : i + 65] for i in starts]).astype("int32")
    count = len(vocabulary)
    model = keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(count, 32),
            layers.Conv1D(64, 4, padding="causal", activation="gelu"),
            layers.LayerNormalization(),
            layers.Dense(count),
        ]
    )
    return model, np.split(lines, 24)


def sines():
    """Returns a network, and 32 batches of four sine waves."""
    rng, batches = np.random.default_rng(0), []
    for _ in range(32):
        x = rng.uniform(-5, 5, (4, 20, 1)).astype("float32")
        high, phase = rng.uniform(0.5, 2, (2, 4, 1, 1))
        batches.append((x, (high * np.sin(x + phase)).astype("float32")))
    hidden = [layers.Dense(40, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((1,)), *hidden, layers.Dense(1)])
    return model, batches
