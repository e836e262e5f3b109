"""SAM: gradients, a step uphill, gradients again."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class Trained(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(1)])

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        ups = [0.01 * tf.sign(g) for g in tape.gradient(loss, weights)]
        for weight, up in zip(weights, ups, strict=True):
            weight.assign_add(up)
        with tf.GradientTape() as tape:
            again = self.compute_loss(x, y, self(x, training=True))
            again = self.optimizer.scale_loss(again)
        gradients = tape.gradient(again, weights)
        for weight, up in zip(weights, ups, strict=True):
            weight.assign_sub(up)
        self.optimizer.apply(gradients, weights)
        return {"total": loss}


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = Trained()
    model.compile("adam", "mse", jit_compile=jit)
    model(x[:1])
    model.optimizer.build(model.trainable_variables)
    history = model.fit(x, y, batch_size=16, epochs=4, verbose=0)
    return history.history["total"]
