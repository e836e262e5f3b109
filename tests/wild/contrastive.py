"""SimCLR with two views: similarities with raw `tf` on float32 labels."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Trained(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(8)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x = data
        with tf.GradientTape() as tape:
            views = [
                self(x + 0.1 * tf.random.normal(tf.shape(x))) for _ in "ab"
            ]
            a, b = (tf.math.l2_normalize(v, axis=1) for v in views)
            logits = tf.matmul(a, b, transpose_b=True) / tf.constant(0.1)
            loss = tf.nn.softmax_cross_entropy_with_logits(
                tf.eye(tf.shape(x)[0]), logits
            )
            loss = tf.reduce_mean(loss)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"total": loss}


def main(jit=False):
    model = Trained()
    model.compile("adam", jit_compile=jit)
    return _fit.losses(model, _fit.numbers()[0], name="total")
