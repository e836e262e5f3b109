"""DCGAN as in Keras's guide: `concat` of real and generated images."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn import datasets


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(8, 3, strides=2, activation="relu"),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(4 * 4 * 4),
                layers.Reshape((4, 4, 4)),
                layers.Conv2DTranspose(1, 4, 2, "same", activation="sigmoid"),
            ]
        )

    def compile(self, d_optimizer, g_optimizer, loss_fn, **kwargs):
        super().compile(**kwargs)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real):
        size = tf.shape(real)[0]
        made = self.generator(tf.random.normal((size, 4)))
        images = tf.concat([made, real], axis=0)
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            loss = self.loss_fn(labels, self.discriminator(images))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            made = self.generator(tf.random.normal((size, 4)))
            fooled = self.loss_fn(tf.zeros((size, 1)), self.discriminator(made))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(fooled, weights), weights)
        return {"total": loss}


def main(jit=False):
    data = datasets.load_digits().images[:512, ..., np.newaxis] / 16
    model = GAN()
    adam = [keras.optimizers.Adam(3e-4) for _ in range(2)]
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(*adam, loss, jit_compile=jit)
    return model.fit(data, batch_size=64, epochs=4, verbose=0).history["total"]
