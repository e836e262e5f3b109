"""Squeeze and excite, the last product with a float32 temperature."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class SqueezeExcite(layers.Layer):
    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.squeeze = layers.Dense(4, activation="relu")
        self.excite = layers.Dense(filters, activation="sigmoid")

    def call(self, x):
        pooled = tf.reduce_mean(x, axis=(1, 2))
        scale = self.excite(self.squeeze(pooled)) / tf.sqrt(2.0)
        return x * scale[:, None, None]


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.random((64, 8, 8, 3), "float32")
    y = rng.integers(0, 3, 64)
    model = keras.Sequential(
        [
            layers.Conv2D(8, 3, padding="same"),
            SqueezeExcite(8),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
