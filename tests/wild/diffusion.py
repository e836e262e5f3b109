"""A denoiser: noise and rates made in float32 in the step."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Trained(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([layers.Dense(32, "relu"), layers.Dense(8)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x = data
        noise = tf.random.normal(tf.shape(x))
        time = tf.random.uniform((tf.shape(x)[0], 1))
        signal, rate = tf.cos(time), tf.sin(time)
        with tf.GradientTape() as tape:
            noisy = tf.concat([signal * x + rate * noise, rate**2], axis=1)
            guess = self.net(noisy, training=True)
            loss = tf.reduce_mean(tf.abs(noise - guess))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"total": loss}


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, 8)).astype("float32")
    model = Trained()
    model.compile("adam", jit_compile=jit)
    history = model.fit(x, batch_size=256, epochs=16, verbose=0)
    return history.history["total"]
