"""VQ-VAE's codebook: distances, one-hot, straight-through gradient."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


class VectorQuantizer(layers.Layer):
    def build(self, shape):
        self.codes = self.add_weight(
            shape=(shape[-1], 12), initializer="uniform"
        )

    def call(self, x):
        far = tf.reduce_sum(self.codes**2, 0) - 2 * tf.matmul(x, self.codes)
        found = tf.one_hot(tf.argmin(far, 1), 12)
        quantized = tf.matmul(found, self.codes, transpose_b=True)
        commitment = tf.stop_gradient(quantized) - x
        codebook = quantized - tf.stop_gradient(x)
        self.add_loss(0.25 * tf.reduce_mean(commitment**2))
        self.add_loss(tf.reduce_mean(codebook**2))
        return x + tf.stop_gradient(quantized - x)


def main(jit=False):
    return _fit.rows(
        layers.Dense(16, activation="relu"), VectorQuantizer(), jit=jit
    )
