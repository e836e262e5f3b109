"""Stochastic depth with `keras.random` in `call`, on any backend."""

import keras
import numpy as np
from keras import layers, ops


class DropPath(layers.Layer):
    def __init__(self, rate, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x, training=None):
        if not training:
            return x
        shape = (ops.shape(x)[0], 1)
        keep = ops.floor(
            1 - self.rate + keras.random.uniform(shape, seed=self.seed)
        )
        return x / (1 - self.rate) * keep


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [
            layers.Dense(16, activation="relu"),
            DropPath(0.2),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
