"""FNet mixes tokens with a Fourier transform, in complex numbers."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


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
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (64, 8))
    y = rng.integers(0, 2, 64)
    model = keras.Sequential(
        [
            layers.Embedding(20, 16),
            FNetBlock(16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
