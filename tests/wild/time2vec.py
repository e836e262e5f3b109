"""Time2Vec for a series: `ops.sin` of a product with own weights."""

import numpy as np
from keras import layers, ops

from tests.wild import _fit


class Time2Vec(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 16))
        self.b = self.add_weight(shape=(16,))

    def call(self, x):
        wave = ops.matmul(x, self.w) + self.b
        first = ops.convert_to_tensor(np.eye(1, 16, dtype="float32"))
        return first * wave + (1.0 - first) * ops.sin(wave)


def main(jit=False):
    return _fit.rows(Time2Vec(), jit=jit)
