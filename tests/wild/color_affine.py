"""A random image transformation as a layer, as in contrastive examples."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


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
    rng = np.random.default_rng(0)
    x = rng.random((64, 8, 8, 3), "float32")
    y = rng.integers(0, 2, 64)
    model = keras.Sequential(
        [
            layers.Rescaling(1.0),
            RandomColorAffine(),
            layers.Conv2D(8, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
