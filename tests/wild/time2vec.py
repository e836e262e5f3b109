"""Time2Vec for a series: `ops.sin` of a product with own weights."""

import keras
import numpy as np
from keras import layers, ops


class Time2Vec(layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 16))
        self.b = self.add_weight(shape=(16,))

    def call(self, x):
        wave = ops.matmul(x, self.w) + self.b
        first = ops.convert_to_tensor(np.eye(1, 16, dtype="float32"))
        return first * wave + (1.0 - first) * ops.sin(wave)


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [
            Time2Vec(),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
