"""Cutout as a layer: random boxes drawn in `call`, raw TensorFlow."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


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
    return _fit.images(
        layers.Conv2D(8, 3, padding="same"),
        Cutout(),
        layers.GlobalAveragePooling2D(),
        jit=jit,
    )
