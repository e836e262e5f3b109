"""A user's own loop over a block that makes a float32 tensor."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Gate(layers.Layer):
    def build(self, shape):
        self.norm = layers.BatchNormalization()
        self.norm.build(shape)

    def call(self, x, training=None):
        x = self.norm(x, training=training)
        return tf.where(x > 0, x, 0.1 * tf.ones(tf.shape(x))) + 1e-9


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16), Gate(), layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(0.01)

    @tf.function(jit_compile=jit)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply(gradients, model.trainable_weights)
        return loss

    optimizer.build(model.trainable_weights)
    return [float(step(x, y)) for _ in range(8)]
