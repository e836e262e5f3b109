"""A random image transformation as a layer, as in contrastive examples."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


class RandomColorAffine(layers.Layer):
    def __init__(self, brightness=0.3, jitter=0.1, **kwargs):
        super().__init__(**kwargs)
        self.brightness, self.jitter = brightness, jitter

    def call(self, images, training=True):
        if not training:
            return images
        size = tf.shape(images)[0]
        scales = 1 + tf.random.uniform(
            (size, 1, 1, 1), -self.brightness, self.brightness
        )
        jitter = tf.random.uniform((size, 1, 3, 3), -self.jitter, self.jitter)
        change = tf.eye(3, batch_shape=[size, 1]) * scales + jitter
        return tf.clip_by_value(tf.matmul(images, change), 0, 1)


def main(jit=False):
    return _fit.images(
        layers.Rescaling(1.0),
        RandomColorAffine(),
        layers.Conv2D(8, 3, activation="relu"),
        layers.GlobalAveragePooling2D(),
        jit=jit,
    )
