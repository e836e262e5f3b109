"""Keras's example of a VAE: a summed loss in its own `train_step`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn import datasets


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        shape = ops.shape(mean)
        epsilon = keras.random.normal(shape, seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_var) * epsilon


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        inputs = keras.Input((8, 8, 1))
        h = layers.Conv2D(16, 3, activation="relu", strides=2)(inputs)
        h = layers.Dense(16, activation="relu")(layers.Flatten()(h))
        mean, log_var = layers.Dense(2)(h), layers.Dense(2)(h)
        z = Sampling()([mean, log_var])
        self.encoder = keras.Model(inputs, [mean, log_var, z])
        self.decoder = keras.Sequential([keras.Input((2,))])
        self.decoder.add(layers.Dense(4 * 4 * 16, activation="relu"))
        self.decoder.add(layers.Reshape((4, 4, 16)))
        last = layers.Conv2DTranspose(1, 3, 2, "same", activation="sigmoid")
        self.decoder.add(last)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            made = self.decoder(z)
            each = keras.losses.binary_crossentropy(data, made)
            loss = ops.mean(ops.sum(each, axis=(1, 2)))
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            loss += ops.mean(ops.sum(kl, axis=1))
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(grads, self.trainable_weights)
        return {"total": loss}


def main(jit=False):
    images = datasets.load_digits().images[:512, ..., np.newaxis] / 16
    model = VAE()
    model.compile(keras.optimizers.Adam(3e-3), jit_compile=jit)
    history = model.fit(
        images.astype("float32"), batch_size=64, epochs=6, verbose=0
    )
    return history.history["total"]
