"""SimCLR with two views: similarities with raw `tf` on float32 labels."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


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
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    model = Trained()
    model.compile("adam", jit_compile=jit)
    history = model.fit(x, batch_size=16, epochs=4, verbose=0)
    return history.history["total"]
