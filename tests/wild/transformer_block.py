"""A user's own block around Keras's attention, scaled in raw `tf`."""

import keras
import tensorflow as tf
from keras import layers

from tests.wild import _fit


class Block(layers.Layer):
    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.attend = layers.MultiHeadAttention(2, dim // 2)
        self.ffn = keras.Sequential(
            [layers.Dense(2 * dim, activation="relu"), layers.Dense(dim)]
        )
        self.norm = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]

    def call(self, x):
        x = self.norm[0](x + self.attend(x, x) * tf.math.rsqrt(2.0))
        return self.norm[1](x + self.ffn(x))


def main(jit=False):
    return _fit.tokens(
        layers.Embedding(20, 16),
        Block(16),
        layers.GlobalAveragePooling1D(),
        jit=jit,
    )
