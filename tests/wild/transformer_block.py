"""A user's own block around Keras's attention, scaled in raw `tf`."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


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
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (64, 8))
    y = rng.integers(0, 2, 64)
    model = keras.Sequential(
        [
            layers.Embedding(20, 16),
            Block(16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy", jit_compile=jit)
    return model.fit(x, y, batch_size=16, epochs=4, verbose=0).history["loss"]
