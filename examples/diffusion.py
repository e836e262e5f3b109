"""A diffusion model in 16 bit: the usual script, with one line in front.

A network learns to tell the noise in a noisy digit. A picture is drawn from
noise in twenty steps, by the moving average of the network, as in Keras's
example of DDIM. At the end the nearest scanned digits read 500 drawings. A
policy and a seed,

    python examples/diffusion.py mixed_float16 0

take half a minute on two cores; `float32` is what to compare with.
"""

import math
import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn import datasets, neighbors

import tfmix

DIGITS = datasets.load_digits()
STEPS, AVERAGE = 20, 0.99


def denoiser():
    """Returns what tells the noise in pixels at a time, knowing the digit."""
    inputs = [keras.Input((size,)) for size in (64, 1, 10)]
    pixels, time, digit = inputs
    time = layers.Dense(16, activation="gelu")(time)
    known = layers.Concatenate()([pixels, time, digit])
    x = layers.Dense(256, activation="gelu")(known)
    for _ in range(2):
        more = layers.Concatenate()([layers.LayerNormalization()(x), known])
        more = layers.Dense(256, activation="gelu")(more)
        x = layers.Add()([x, layers.Dense(256)(more)])
    return keras.Model(inputs, layers.Dense(64)(x))


class Diffusion(keras.Model):
    """A denoiser and its moving average."""

    def __init__(self):
        super().__init__()
        self.network, self.average = denoiser(), denoiser()
        self.average.set_weights(self.network.get_weights())
        self.average.trainable = False
        self.error = keras.metrics.Mean(name="error")

    def train_step(self, data):
        """Trains on noise of a random share; moves the average."""
        pixels, digits = data
        noise = tf.random.normal(tf.shape(pixels))
        time = tf.random.uniform((tf.shape(pixels)[0], 1))
        angle = math.pi / 2 * time
        noisy = tf.cos(angle) * pixels + tf.sin(angle) * noise
        with tf.GradientTape() as tape:
            told = self.network([noisy, time, digits], training=True)
            loss = tf.reduce_mean((told - noise) ** 2)
        weights = self.network.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for kept, new in zip(self.average.weights, weights, strict=True):
            kept.assign(AVERAGE * kept + (1 - AVERAGE) * new)
        self.error.update_state(loss)
        return {"error": self.error.result()}

    def draw(self, digits):
        """Draws digits from noise."""
        x = tf.random.normal((len(digits), 64))
        for step in range(STEPS, 0, -1):
            now, then = (math.pi / 2 * n / STEPS for n in (step, step - 1))
            time = tf.fill((len(digits), 1), step / STEPS)
            noise = self.average([x, time, digits])
            # At first there is no signal: cos(now) is zero.
            clean = (x - math.sin(now) * noise) / max(math.cos(now), 0.02)
            clean = tf.clip_by_value(clean, -1.0, 1.0)
            x = math.cos(then) * clean + math.sin(then) * noise
        return x


def train(policy="mixed_float16", seed=0, epochs=80):
    """Trains on scikit-learn's scanned digits."""
    tfmix.set_global_policy(policy)  # the one line
    keras.utils.set_random_seed(seed)
    model = Diffusion()
    model.compile(keras.optimizers.AdamW(2e-3))
    pixels = (DIGITS.data / 8 - 1).astype("float32")
    digits = np.eye(10, dtype="float32")[DIGITS.target]
    model.fit(pixels, digits, batch_size=64, epochs=epochs, verbose=2)
    return model


def score(model):
    """Returns the share of drawings that are read as what was asked for."""
    reader = neighbors.KNeighborsClassifier(3)
    reader.fit(DIGITS.data / 8 - 1, DIGITS.target)
    asked = np.arange(500) % 10
    return reader.score(model.draw(tf.one_hot(asked, 10)).numpy(), asked)


if __name__ == "__main__":
    policy, seed = sys.argv[1:] or ("mixed_float16", "0")
    print(f"read as asked: {score(train(policy, int(seed))):.1%}")
