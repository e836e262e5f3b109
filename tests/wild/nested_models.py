"""A block that mixes dtypes two models deep."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Scale(layers.Layer):
    def call(self, x):
        return x * tf.linspace(0.5, 1.5, x.shape[-1])


def tower(units):
    return keras.Sequential([layers.Dense(units, activation="relu"), Scale()])


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [
            keras.Sequential([tower(16), tower(8)]),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
