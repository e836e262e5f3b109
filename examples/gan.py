"""A GAN in 16 bit: the usual script, with one line in front.

One network draws the digit it is asked for, another tells drawings from scans.
At the end the nearest scanned digits read 500 drawings. A policy and a seed,

    python examples/gan.py mixed_float16 0

take a quarter of a minute on two cores; `float32` is what to compare with.
"""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn import datasets, neighbors

import tfmix

DIGITS = datasets.load_digits()


def network(*sizes, activation=None):
    """Returns dense layers with leaky units between them."""
    hidden = [
        layer
        for size in sizes[:-1]
        for layer in (layers.Dense(size), layers.LeakyReLU(0.2))
    ]
    return keras.Sequential([*hidden, layers.Dense(sizes[-1], activation)])


class GAN(keras.Model):
    """Two networks with an optimizer each, as in Keras's guide."""

    def __init__(self):
        super().__init__()
        self.generator = network(128, 128, 64, activation="sigmoid")
        self.discriminator = network(128, 64, 1)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        """Takes an optimizer for each network."""
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn

    def draw(self, digits, training=False):
        """Draws digits from noise."""
        noise = tf.random.normal((tf.shape(digits)[0], 16))
        return self.generator(tf.concat([noise, digits], 1), training=training)

    def judge(self, pixels, digits):
        """Returns a logit: whether these are scans of the digits."""
        return self.discriminator(tf.concat([pixels, digits], 1), training=True)

    def train_step(self, data):
        """Trains the discriminator, then the generator."""
        pixels, digits = data
        ones = tf.ones((tf.shape(pixels)[0], 1))

        drawn = self.draw(digits, training=True)
        with tf.GradientTape() as tape:
            # Scans are 0.9, not 1: a judge that is never sure teaches more.
            d_loss = self.loss_fn(0.9 * ones, self.judge(pixels, digits))
            d_loss += self.loss_fn(0.0 * ones, self.judge(drawn, digits))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

        with tf.GradientTape() as tape:
            drawn = self.draw(digits, training=True)
            g_loss = self.loss_fn(ones, self.judge(drawn, digits))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


def train(policy="mixed_float16", seed=0, epochs=40):
    """Trains on scikit-learn's scanned digits."""
    tfmix.set_global_policy(policy)  # the one line
    keras.utils.set_random_seed(seed)
    gan = GAN()
    gan.compile(
        keras.optimizers.Adam(1e-3, beta_1=0.5),
        keras.optimizers.Adam(1e-3, beta_1=0.5),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    pixels = (DIGITS.data / 16).astype("float32")
    digits = np.eye(10, dtype="float32")[DIGITS.target]
    gan.fit(pixels, digits, batch_size=64, epochs=epochs, verbose=2)
    return gan


def score(gan):
    """Returns the share of drawings that are read as what was asked for."""
    reader = neighbors.KNeighborsClassifier(3)
    reader.fit(DIGITS.data / 16, DIGITS.target)
    asked = np.arange(500) % 10
    return reader.score(gan.draw(tf.one_hot(asked, 10)).numpy(), asked)


if __name__ == "__main__":
    policy, seed = sys.argv[1:] or ("mixed_float16", "0")
    print(f"read as asked: {score(train(policy, int(seed))):.1%}")
