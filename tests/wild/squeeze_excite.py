"""Squeeze and excite, the last product with a float32 temperature."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


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
    return _fit.images(
        layers.Conv2D(8, 3, padding="same"),
        SqueezeExcite(8),
        layers.GlobalAveragePooling2D(),
        jit=jit,
    )
