"""ViT's patches: `tf.image` and an embedding of `ops.arange`."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Patches(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.project = layers.Dense(16)
        self.position = layers.Embedding(4, 16)

    def call(self, x):
        p = tf.image.extract_patches(
            x, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID"
        )
        p = tf.reshape(p, (-1, 4, 4 * 4 * 8))
        return self.project(p) + self.position(tf.range(4))


def main(jit=False):
    return _fit.images(
        layers.Conv2D(8, 3, padding="same"),
        Patches(),
        layers.GlobalAveragePooling1D(),
        jit=jit,
    )
