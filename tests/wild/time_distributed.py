"""A user's own layer in `TimeDistributed`, on a short series."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Decay(layers.Layer):
    def call(self, x):
        return x * tf.exp(-tf.range(16, dtype=tf.float32) / 16.0)

    def compute_output_shape(self, shape):
        return shape


def main(jit=False):
    return _fit.tokens(
        layers.Embedding(20, 16),
        layers.TimeDistributed(Decay()),
        layers.Bidirectional(layers.GRU(8)),
        jit=jit,
    )
