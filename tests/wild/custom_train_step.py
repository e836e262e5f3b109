"""The guide's own `train_step`, written with a tape."""

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
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - y_pred))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"total": loss}


def main(jit=False):
    model = Trained()
    model.compile("adam", "mse", jit_compile=jit)
    return _fit.losses(model, *_fit.numbers(), name="total")
