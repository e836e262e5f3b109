"""A denoiser of digits with an average of its weights, as in diffusion."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn import datasets


def network():
    images, rates = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    rate = layers.UpSampling2D(8)(rates)
    first = layers.Concatenate()([images, rate])
    first = layers.Conv2D(16, 3, padding="same", activation="swish")(first)
    h = layers.AveragePooling2D(2)(first)
    h = layers.Conv2D(32, 3, padding="same", activation="swish")(h)
    h = layers.Concatenate()([layers.UpSampling2D(2)(h), first])
    h = layers.Conv2D(16, 3, padding="same", activation="swish")(h)
    return keras.Model([images, rates], layers.Conv2D(1, 1)(h))


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.network, self.average = network(), network()
        self.average.set_weights(self.network.get_weights())
        self.tracker = keras.metrics.Mean(name="noise")

    def train_step(self, images):
        size = tf.shape(images)[0]
        noise = tf.random.normal(tf.shape(images))
        angle = tf.random.uniform((size, 1, 1, 1), 0.1, 1.4)
        noisy = tf.cos(angle) * images + tf.sin(angle) * noise
        with tf.GradientTape() as tape:
            guess = self.network([noisy, tf.sin(angle) ** 2], training=True)
            loss = tf.reduce_mean(tf.abs(noise - guess))
        weights = self.network.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        both = zip(self.network.weights, self.average.weights, strict=True)
        for weight, average in both:
            average.assign(0.9 * average + 0.1 * weight)
        self.tracker.update_state(loss)
        return {"noise": self.tracker.result()}

    @property
    def metrics(self):
        return [self.tracker]


def main(jit=False):
    images = datasets.load_digits().images[:512, ..., np.newaxis] / 8 - 1
    model = Diffusion()
    model.compile(keras.optimizers.AdamW(3e-3), jit_compile=jit)
    history = model.fit(
        images.astype("float32"), batch_size=64, epochs=6, verbose=0
    )
    return history.history["noise"]
