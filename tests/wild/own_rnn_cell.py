"""A user's own recurrent cell that adds a float32 constant."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class MinimalCell(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = self.state_size = units
        self.dense = layers.Dense(units)

    def build(self, shape):
        self.dense.build((shape[0], shape[1] + self.units))
        self.decay = tf.fill((self.units,), 0.9)

    def call(self, x, states):
        (h,) = states
        h = self.decay * h + tf.tanh(self.dense(tf.concat([x, h], -1)))
        return h, [h]


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 5, 4)).astype("float32")
    y = x.sum((1, 2))[:, None]
    model = keras.Sequential(
        [keras.Input((5, 4)), layers.RNN(MinimalCell(8)), layers.Dense(1)]
    )
    model.compile("adam", "mse", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
