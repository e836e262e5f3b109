"""A global filter: a real FFT with complex weights in between."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


class GlobalFilter(layers.Layer):
    def build(self, shape):
        bins = shape[1] // 2 + 1
        self.real = self.add_weight(shape=(bins, shape[2]))
        self.imag = self.add_weight(shape=(bins, shape[2]))

    def call(self, x):
        f = tf.signal.rfft(tf.transpose(x, (0, 2, 1)))
        f = f * tf.transpose(tf.complex(self.real, self.imag))[None]
        return tf.transpose(tf.signal.irfft(f), (0, 2, 1))


def main(jit=False):
    return _fit.tokens(
        layers.Embedding(20, 16),
        GlobalFilter(),
        layers.GlobalAveragePooling1D(),
        jit=jit,
    )
