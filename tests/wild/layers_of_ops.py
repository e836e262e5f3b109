"""Layers that people write with `keras.ops`, on any backend."""

import keras
import numpy as np
from keras import layers, ops

from tests.wild._fit import dense, embed, rows, tokens


class DropPath(layers.Layer):
    """Stochastic depth with `keras.random` in `call`, on any backend."""

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


class SoftMax1(layers.Layer):
    """A soft maximum by a power, guarded by 1e-30."""

    def call(self, x):
        up = ops.exp(x - ops.max(x, -1, keepdims=True))
        return up / (ops.sum(up, -1, keepdims=True) + 1e-30)


class Standardise(layers.Layer):
    """Normalizes by a root with an epsilon of 1e-9."""

    def call(self, x):
        mean = ops.mean(x, -1, keepdims=True)
        var = ops.mean(ops.square(x - mean), -1, keepdims=True)
        return (x - mean) / ops.sqrt(var + 1e-9)


class Highway(layers.Layer):
    """A gate with a NumPy table as bias, on any backend."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(16, activation="sigmoid")
        self.bias = np.linspace(-1, 1, 16, dtype="float32")

    def call(self, x):
        g = self.gate(x)
        return g * x + (1.0 - g) * self.bias


class MaskedMax(layers.Layer):
    """Masked max pooling, with -1e30 where there is padding."""

    def call(self, x):
        present = ops.any(ops.not_equal(x, 0), axis=-1, keepdims=True)
        return ops.max(ops.where(present, x, -1e30), axis=1)


class Extended(layers.Layer):
    """Homogeneous coordinates: `ops.ones` and `ops.arange` made in `call`."""

    def call(self, x):
        n = ops.shape(x)[0]
        steps = ops.tile(
            ops.reshape(ops.arange(8, dtype="float32"), (1, 8)), (n, 1)
        )
        return ops.concatenate([x, ops.ones((n, 1)), steps / 8.0], axis=-1)


class Time2Vec(layers.Layer):
    """Time2Vec for a series: `ops.sin` of a product with own weights."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 16))
        self.b = self.add_weight(shape=(16,))

    def call(self, x):
        wave = ops.matmul(x, self.w) + self.b
        first = ops.convert_to_tensor(np.eye(1, 16, dtype="float32"))
        return first * wave + (1.0 - first) * ops.sin(wave)


SCRIPTS = {
    "drop_path_keras_random": lambda jit: rows(jit, dense(), DropPath(0.2)),
    "epsilon_1e30": lambda jit: rows(jit, dense(), SoftMax1()),
    "epsilon_1e9": lambda jit: rows(jit, dense(), Standardise()),
    "highway_numpy_bias": lambda jit: rows(jit, dense(), Highway()),
    "mask_1e30": lambda jit: tokens(jit, embed(), MaskedMax()),
    "ops_ones_in_call": lambda jit: rows(jit, layers.Dense(8), Extended()),
    "time2vec": lambda jit: rows(jit, Time2Vec()),
}
