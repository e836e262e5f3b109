"""Masked autoencoding: single layers called in the step."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Trained(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = layers.Dense(16, "relu")
        self.decode = layers.Dense(8)

    def call(self, x):
        return self.decode(self.embed(x))

    def train_step(self, data):
        x = data
        keep = tf.cast(tf.random.uniform(tf.shape(x)) > 0.3, tf.float32)
        with tf.GradientTape() as tape:
            h = self.embed(x * keep)
            guess = self.decode(h + tf.random.normal(tf.shape(h), stddev=0.01))
            loss = tf.reduce_mean((1 - keep) * (guess - x) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"total": loss}


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    model = Trained()
    model(x[:1])
    model.compile("adam", jit_compile=jit)
    history = model.fit(x, batch_size=16, epochs=4, verbose=0)
    return history.history["total"]
