"""Sinusoidal positions: a table of constants made in float32."""

import numpy as np
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Positions(layers.Layer):
    def build(self, shape):
        angle = np.arange(shape[1])[:, None] / 1e4 ** (
            np.arange(shape[2]) / shape[2]
        )
        self.table = np.sin(angle).astype("float32")

    def call(self, x):
        return tf.sqrt(16.0) * x + tf.constant(self.table)


def main(jit=False):
    return _fit.tokens(
        layers.Embedding(20, 16),
        Positions(),
        layers.GlobalAveragePooling1D(),
        jit=jit,
    )
