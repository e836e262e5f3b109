"""Keras's guide to `fit`: a `train_step` that scales no loss, and SGD."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Trained(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    inputs = keras.Input((8,))
    hidden = layers.Dense(16, "relu")(inputs)
    model = Trained(inputs, layers.Dense(1)(hidden))
    sgd = keras.optimizers.SGD(0.02)
    model.compile(sgd, "mse", metrics=["mae"], jit_compile=jit)
    history = model.fit(x, y, batch_size=16, epochs=4, verbose=0)
    return history.history["loss"]
