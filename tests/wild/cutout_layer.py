"""Cutout as a layer: random boxes drawn in `call`, raw TensorFlow."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Cutout(layers.Layer):
    def call(self, x, training=None):
        if not training:
            return x
        n = tf.shape(x)[0]
        centre = tf.random.uniform((n, 1, 1, 1), 0, 8)
        rows = tf.reshape(tf.range(8, dtype=tf.float32), (1, 8, 1, 1))
        inside = tf.cast(tf.abs(rows - centre) < 2, tf.float32)
        return x * (1 - inside)


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.random((64, 8, 8, 3), "float32")
    y = rng.integers(0, 3, 64)
    model = keras.Sequential(
        [
            layers.Conv2D(8, 3, padding="same"),
            Cutout(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
