"""A ranking loss, and top-k accuracy with raw `tf`."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Trained(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(5)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        y = tf.cast(tf.reduce_sum(tf.abs(y), -1), tf.int32) % 5
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
            loss = tf.reduce_mean(loss)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        hits = tf.math.in_top_k(y, logits, k=2)
        return {
            "total": loss,
            "top2": tf.reduce_mean(tf.cast(hits, tf.float32)),
        }


def main(jit=False):
    model = Trained()
    model.compile("adam", "mse", jit_compile=jit)
    return _fit.losses(model, *_fit.numbers(), name="total")
