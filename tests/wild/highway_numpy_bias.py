"""A gate with a NumPy table as bias, on any backend."""

import numpy as np
from keras import layers

from tests.wild import _fit


class Highway(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(16, activation="sigmoid")
        self.bias = np.linspace(-1, 1, 16, dtype="float32")

    def call(self, x):
        g = self.gate(x)
        return g * x + (1.0 - g) * self.bias


def main(jit=False):
    return _fit.rows(layers.Dense(16, activation="relu"), Highway(), jit=jit)
