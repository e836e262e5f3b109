"""VAE in a single model: sampling, `add_loss`, `call`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class VAE(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encode = layers.Dense(16, activation="relu")
        self.mean, self.log_var = layers.Dense(2), layers.Dense(2)
        self.decode = keras.Sequential(
            [
                layers.Dense(16, activation="relu"),
                layers.Dense(8, activation="sigmoid"),
            ]
        )

    def call(self, x):
        h = self.encode(x)
        mean, log_var = self.mean(h), self.log_var(h)
        noise = tf.random.normal(tf.shape(mean))
        z = mean + tf.exp(0.5 * log_var) * noise
        kl = 1 + log_var - tf.square(mean) - tf.exp(log_var)
        self.add_loss(-0.05 * tf.reduce_mean(kl))
        return self.decode(z)


def main(jit=False):
    x = np.random.default_rng(0).random((64, 8), "float32")
    model = VAE()
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return model.fit(x, x, batch_size=16, epochs=4, verbose=0).history["loss"]
