"""A user's own layer in `TimeDistributed`, on a short series."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Decay(layers.Layer):
    def call(self, x):
        return x * tf.exp(-tf.range(16, dtype=tf.float32) / 16.0)

    def compute_output_shape(self, shape):
        return shape


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (64, 8))
    y = rng.integers(0, 2, 64)
    model = keras.Sequential(
        [
            layers.Embedding(20, 16),
            layers.TimeDistributed(Decay()),
            layers.Bidirectional(layers.GRU(8)),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
