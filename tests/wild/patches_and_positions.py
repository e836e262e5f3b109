"""ViT's patches: `tf.image` and an embedding of `ops.arange`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


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
    rng = np.random.default_rng(0)
    x = rng.random((64, 8, 8, 3), "float32")
    y = rng.integers(0, 3, 64)
    model = keras.Sequential(
        [
            layers.Conv2D(8, 3, padding="same"),
            Patches(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
