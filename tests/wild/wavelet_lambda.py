"""Lambdas over `tf.signal`: frames, windows, magnitudes."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def spectrogram(x):
    frames = tf.signal.frame(tf.reshape(x, (-1, 16)), 8, 4)
    window = tf.signal.hann_window(8)
    return tf.abs(tf.signal.rfft(frames * window))


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [
            layers.Dense(16),
            layers.Lambda(spectrogram),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
