"""The guide's loop from scratch, eager and unscaled, with a metric."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Noisy(layers.Layer):
    def call(self, x, training=None):
        return x + tf.random.normal(tf.shape(x), stddev=0.01) if training else x


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = rng.integers(0, 3, 64)
    model = keras.Sequential(
        [layers.Dense(16, "relu"), Noisy(), layers.Dense(3)]
    )
    optimizer = keras.optimizers.SGD(0.1)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.SparseCategoricalAccuracy()
    losses = []
    for i in range(0, 64, 16):
        with tf.GradientTape() as tape:
            logits = model(x[i : i + 16], training=True)
            loss = loss_fn(y[i : i + 16], logits)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_weights, strict=True)
        )
        metric.update_state(y[i : i + 16], logits)
        losses.append(float(loss))
    return losses
