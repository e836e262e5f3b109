"""Mixup inside the model, with shares drawn by raw TensorFlow."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Mixup(layers.Layer):
    def call(self, x, training=None):
        if not training:
            return x
        # Gamma and beta have no XLA kernel, even in float32.
        part = tf.random.uniform((tf.shape(x)[0], 1, 1, 1), 0.7, 1.0)
        return part * x + (1 - part) * tf.reverse(x, [0])


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.random((64, 8, 8, 3), "float32")
    y = rng.integers(0, 3, 64)
    model = keras.Sequential(
        [
            layers.Conv2D(8, 3, padding="same"),
            Mixup(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
