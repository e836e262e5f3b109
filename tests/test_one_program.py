"""One program: what layers compute decides, not how their model was made."""

import collections
import copy
import pickle
import re

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix._keras import compile_method

POLICIES = ("mixed_float16", "mixed_bfloat16")
ON_JAX = keras.backend.backend() == "jax"
ROWS = 4
Y = np.arange(ROWS) % 3


def dense():
    """Dense with BatchNormalization."""
    return (6,), [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3),
        tfmix.float32_output("softmax"),
    ]


def convolution():
    """Conv2D."""
    return (6, 6, 1), [
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3),
        tfmix.float32_output("softmax"),
    ]


def recurrent():
    """LSTM with a mask."""
    return (5, 2), [
        keras.layers.Masking(),
        keras.layers.LSTM(4),
        keras.layers.Dense(3),
        keras.layers.Softmax(dtype="float32"),
    ]


@keras.saving.register_keras_serializable("one_program")
class SelfAttention(keras.layers.Layer):
    """Attention of a sequence to itself, as a layer of one argument."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x)


def attention():
    """Attention."""
    return (5, 4), [
        keras.layers.LayerNormalization(),
        SelfAttention(),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
        tfmix.float32_output("softmax"),
    ]


def activation():
    """One that ends in a plain `Activation`."""
    return (6,), [
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(3),
        keras.layers.Activation("softmax"),
    ]


MODELS = (dense, convolution, recurrent, attention, activation)


def made(kind):
    """Returns a model of a kind, under what is in force."""
    shape, row = kind()
    x = inputs = keras.Input(shape)
    for layer in row:
        x = layer(x)
    return keras.Model(inputs, x)


def compiled(model):
    """Compiles a model as everybody does."""
    model.compile("adam", "sparse_categorical_crossentropy")
    return model
