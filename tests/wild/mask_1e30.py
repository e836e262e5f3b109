"""Masked max pooling, with -1e30 where there is padding."""

import keras
import numpy as np
from keras import layers, ops


class MaskedMax(layers.Layer):
    def call(self, x):
        present = ops.any(ops.not_equal(x, 0), axis=-1, keepdims=True)
        return ops.max(ops.where(present, x, -1e30), axis=1)


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (64, 8))
    y = rng.integers(0, 2, 64)
    model = keras.Sequential(
        [
            layers.Embedding(20, 16),
            MaskedMax(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
