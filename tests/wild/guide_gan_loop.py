"""The guide's DCGAN without `fit`: one step, two models, two optimizers."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn import datasets


def main(jit=False):
    discriminator = keras.Sequential([keras.Input((8, 8, 1))])
    discriminator.add(layers.Conv2D(16, 3, strides=2, padding="same"))
    discriminator.add(layers.LeakyReLU(negative_slope=0.2))
    discriminator.add(layers.Conv2D(32, 3, strides=2, padding="same"))
    discriminator.add(layers.LeakyReLU(negative_slope=0.2))
    discriminator.add(layers.GlobalMaxPooling2D())
    discriminator.add(layers.Dense(1))
    generator = keras.Sequential([keras.Input((16,))])
    generator.add(layers.Dense(4 * 4 * 16))
    generator.add(layers.LeakyReLU(negative_slope=0.2))
    generator.add(layers.Reshape((4, 4, 16)))
    generator.add(layers.Conv2DTranspose(16, 4, strides=2, padding="same"))
    generator.add(layers.LeakyReLU(negative_slope=0.2))
    generator.add(layers.Conv2D(1, 7, padding="same", activation="sigmoid"))
    d_optimizer = keras.optimizers.Adam(learning_rate=0.0003)
    g_optimizer = keras.optimizers.Adam(learning_rate=0.0004)
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function(jit_compile=jit)
    def train_step(real_images):
        generated_images = generator(tf.random.normal(shape=(64, 16)))
        combined = tf.concat([generated_images, real_images], axis=0)
        labels = tf.concat([tf.ones((64, 1)), tf.zeros((64, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(labels.shape)
        with tf.GradientTape() as tape:
            d_loss = loss_fn(labels, discriminator(combined))
        grads = tape.gradient(d_loss, discriminator.trainable_weights)
        d_optimizer.apply(grads, discriminator.trainable_weights)
        random_latent_vectors = tf.random.normal(shape=(64, 16))
        with tf.GradientTape() as tape:
            predictions = discriminator(generator(random_latent_vectors))
            g_loss = loss_fn(tf.zeros((64, 1)), predictions)
        grads = tape.gradient(g_loss, generator.trainable_weights)
        g_optimizer.apply(grads, generator.trainable_weights)
        return d_loss

    d_optimizer.build(discriminator.trainable_weights)
    g_optimizer.build(generator.trainable_weights)
    images = datasets.load_digits().images[:1024, ..., np.newaxis] / 16
    batches = np.split(images.astype("float32"), 16)
    return [float(train_step(tf.constant(batch))) for batch in batches * 2]
