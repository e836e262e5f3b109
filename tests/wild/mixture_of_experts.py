"""Experts and a router that counts its load in float32."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


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
    return _fit.rows(layers.Dense(16, activation="relu"), Experts(), jit=jit)
