"""Mixup inside the model, with shares drawn by raw TensorFlow."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Mixup(layers.Layer):
    def call(self, x, training=None):
        if not training:
            return x
        # Gamma and beta have no XLA kernel, even in float32.
        part = tf.random.uniform((tf.shape(x)[0], 1, 1, 1), 0.7, 1.0)
        return part * x + (1 - part) * tf.reverse(x, [0])


def main(jit=False):
    return _fit.images(
        layers.Conv2D(8, 3, padding="same"),
        Mixup(),
        layers.GlobalAveragePooling2D(),
        jit=jit,
    )
