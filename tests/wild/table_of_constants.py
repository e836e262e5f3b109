"""Sinusoidal positions: a table of constants made in float32."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Positions(layers.Layer):
    def build(self, shape):
        angle = np.arange(shape[1])[:, None] / 1e4 ** (
            np.arange(shape[2]) / shape[2]
        )
        self.table = np.sin(angle).astype("float32")

    def call(self, x):
        return tf.sqrt(16.0) * x + tf.constant(self.table)


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (64, 8))
    y = rng.integers(0, 2, 64)
    model = keras.Sequential(
        [
            layers.Embedding(20, 16),
            Positions(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
