"""A siamese net with a user's own triplet loss."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Trained(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(4)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x = data
        noise = tf.random.normal(tf.shape(x), stddev=0.1)
        with tf.GradientTape() as tape:
            a, p, n = self(x), self(x + noise), self(tf.roll(x, 1, 0))
            near, far = (tf.reduce_sum((a - b) ** 2, -1) for b in (p, n))
            loss = tf.reduce_mean(
                tf.maximum(near - far + tf.ones_like(near), 0.0)
            )
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"total": loss}


def main(jit=False):
    model = Trained()
    model.compile("adam", jit_compile=jit)
    return _fit.losses(model, _fit.numbers()[0], name="total")
