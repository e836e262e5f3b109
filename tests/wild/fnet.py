"""FNet mixes tokens with a Fourier transform, in complex numbers."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class FNetBlock(layers.Layer):
    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.ffn = keras.Sequential(
            [layers.Dense(2 * dim, activation="gelu"), layers.Dense(dim)]
        )
        self.norm1 = layers.LayerNormalization()
        self.norm2 = layers.LayerNormalization()

    def call(self, inputs):
        inp_complex = tf.cast(inputs, tf.complex64)
        fft = tf.math.real(tf.signal.fft2d(inp_complex))
        x = self.norm1(inputs + fft)
        return self.norm2(x + self.ffn(x))


def main(jit=False):
    return _fit.tokens(
        layers.Embedding(20, 16),
        FNetBlock(16),
        layers.GlobalAveragePooling1D(),
        jit=jit,
    )
