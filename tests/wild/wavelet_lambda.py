"""Lambdas over `tf.signal`: frames, windows, magnitudes."""

import tensorflow as tf
from keras import layers

from tests.wild import _fit


def spectrogram(x):
    frames = tf.signal.frame(tf.reshape(x, (-1, 16)), 8, 4)
    window = tf.signal.hann_window(8)
    return tf.abs(tf.signal.rfft(frames * window))


def main(jit=False):
    return _fit.rows(
        layers.Dense(16), layers.Lambda(spectrogram), layers.Flatten(), jit=jit
    )
