"""Normalizes by a root with an epsilon of 1e-9."""

import keras
import numpy as np
from keras import layers, ops


class Standardise(layers.Layer):
    def call(self, x):
        mean = ops.mean(x, -1, keepdims=True)
        var = ops.mean(ops.square(x - mean), -1, keepdims=True)
        return (x - mean) / ops.sqrt(var + 1e-9)


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [
            layers.Dense(16, activation="relu"),
            Standardise(),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
