"""SAM: gradients, a step uphill, gradients again."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild import _fit


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
    x, y = _fit.numbers()
    model = Trained()
    model.compile("adam", "mse", jit_compile=jit)
    model(x[:1])
    model.optimizer.build(model.trainable_variables)
    return _fit.losses(model, x, y, name="total")
