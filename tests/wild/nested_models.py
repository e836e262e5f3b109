"""A block that mixes dtypes two models deep."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Scale(layers.Layer):
    def call(self, x):
        return x * tf.linspace(0.5, 1.5, x.shape[-1])


def tower(units):
    return keras.Sequential([layers.Dense(units, activation="relu"), Scale()])


def main(jit=False):
    return _fit.rows(keras.Sequential([tower(16), tower(8)]), jit=jit)
