"""Stochastic depth as in Keras's CCT example: raw `tf` in a residual block."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class StochasticDepth(layers.Layer):
    def __init__(self, drop, **kwargs):
        super().__init__(**kwargs)
        self.drop = drop

    def call(self, x, training=None):
        if training:
            keep = 1 - self.drop
            shape = (tf.shape(x)[0],) + (1,) * (len(x.shape) - 1)
            random_tensor = keep + tf.random.uniform(shape, 0, 1)
            return (x / keep) * tf.floor(random_tensor)
        return x


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = rng.integers(0, 3, 64)
    inputs = keras.Input((8,))
    z = layers.Dense(16, activation="relu")(inputs)
    for _ in range(2):
        z = z + StochasticDepth(0.1)(layers.Dense(16, activation="relu")(z))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(z))
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
