"""A global filter: a real FFT with complex weights in between."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


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
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (64, 8))
    y = rng.integers(0, 2, 64)
    model = keras.Sequential(
        [
            layers.Embedding(20, 16),
            GlobalFilter(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
