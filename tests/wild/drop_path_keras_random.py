"""Stochastic depth with `keras.random` in `call`, on any backend."""

import keras
from keras import layers, ops

from tests.wild import _fit


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
    return _fit.rows(
        layers.Dense(16, activation="relu"), DropPath(0.2), jit=jit
    )
