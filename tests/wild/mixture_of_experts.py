"""Experts and a router that counts its load in float32."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Experts(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.experts = [layers.Dense(16) for _ in range(3)]
        self.router = layers.Dense(3)

    def call(self, x):
        gates = tf.nn.softmax(tf.cast(self.router(x), tf.float32))
        self.add_loss(0.01 * tf.reduce_sum(tf.reduce_mean(gates, 0) ** 2))
        outs = tf.stack([expert(x) for expert in self.experts], -1)
        return tf.reduce_sum(outs * gates[:, None], -1)


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [
            layers.Dense(16, activation="relu"),
            Experts(),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
