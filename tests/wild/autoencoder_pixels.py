"""An autoencoder of pictures, the mean over 12,288 pixels, `train_step`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn import datasets


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten = layers.Flatten()
        self.encode = layers.Dense(32, activation="relu")
        self.decode = layers.Dense(64 * 64 * 3, activation="sigmoid")
        self.shape_back = layers.Reshape((64, 64, 3))
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.shape_back(self.decode(self.encode(self.flatten(x))))

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x - self(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


def main(jit=False):
    image = datasets.load_sample_image("china.jpg").astype("float32") / 255
    corners = [(i, j) for i in range(0, 352, 32) for j in range(0, 576, 32)]
    x = np.stack([image[i : i + 64, j : j + 64] for i, j in corners])
    model = Autoencoder()
    model.compile(keras.optimizers.SGD(2.0), jit_compile=jit)
    history = model.fit(x[:192], batch_size=64, epochs=8, verbose=0)
    return history.history["loss"]
