"""Keras's example of SimCLR: two unwrapped optimizers, a probe, digits."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn import datasets


class Contrastive(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((8, 8, 1))])
        self.encoder.add(layers.Conv2D(16, 3, activation="relu"))
        self.encoder.add(layers.Flatten())
        self.encoder.add(layers.Dense(32, activation="relu"))
        self.head = self.linear(16)
        self.probe = self.linear(10)

    def linear(self, units):
        return keras.Sequential([keras.Input((32,)), layers.Dense(units)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(True)

    def train_step(self, data):
        images, labels = data
        noise = tf.random.normal(tf.shape(images), stddev=0.1)
        one, two = tf.roll(images + noise, 1, 1), tf.roll(images, 1, 2)
        with tf.GradientTape() as tape:
            views = self.head(self.encoder(one)), self.head(self.encoder(two))
            a, b = (tf.math.l2_normalize(v, axis=1) for v in views)
            near = tf.matmul(a, b, transpose_b=True) / 0.1
            right = tf.range(tf.shape(images)[0])
            loss = keras.losses.sparse_categorical_crossentropy
            there = loss(right, near, from_logits=True)
            back = loss(right, tf.transpose(near), from_logits=True)
            loss = tf.reduce_mean(there + back) / 2
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        self.contrastive_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(images, training=False))
            probe = self.probe_loss(labels, logits)
        weights = self.probe.trainable_weights
        self.probe_optimizer.apply(tape.gradient(probe, weights), weights)
        return {"total": loss, "probe": probe}


def main(jit=False):
    digits = datasets.load_digits()
    x = digits.images[:512, ..., np.newaxis].astype("float32") / 16
    model = Contrastive()
    adam = [keras.optimizers.Adam(3e-3) for _ in range(2)]
    model.compile(*adam, jit_compile=jit)
    history = model.fit(x, digits.target[:512], 64, epochs=4, verbose=0)
    return history.history["total"]
