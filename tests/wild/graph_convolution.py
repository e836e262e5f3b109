"""A graph layer: messages gathered and summed with raw `tf`."""

import numpy as np
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class GraphConvolution(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(16)
        rng = np.random.default_rng(1)
        self.edges = rng.integers(0, 8, (2, 20))
        self.weights_of = tf.constant(rng.random(20), tf.float32)

    def call(self, x):
        h = self.dense(x)
        messages = (
            tf.gather(h, self.edges[0], axis=1) * self.weights_of[:, None]
        )
        summed = tf.math.unsorted_segment_sum(
            tf.transpose(messages, (1, 0, 2)), self.edges[1], 8
        )
        return tf.nn.relu(tf.transpose(summed, (1, 0, 2)) + h)


def main(jit=False):
    return _fit.tokens(
        layers.Embedding(20, 16),
        GraphConvolution(),
        layers.GlobalAveragePooling1D(),
        jit=jit,
    )
