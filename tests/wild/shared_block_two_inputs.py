"""A functional model of two inputs and a layer used twice."""

import keras
import numpy as np
from keras import layers


class Gated(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8)

    def call(self, inputs):
        a, b = inputs
        gate = np.linspace(0, 1, 8, dtype="float32")
        return self.dense(a) * gate + b / 1e9


def main(jit=False):
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(64, 8)).astype("float32") for _ in "ab"]
    y = x[0].sum(1, keepdims=True)
    a, b = keras.Input((8,)), keras.Input((8,))
    gated = Gated()
    z = gated([gated([a, b]), b])
    model = keras.Model([a, b], layers.Dense(1)(z))
    model.compile("adam", "mse", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
