"""A user's own attention with a mask of -1e9, as in many tutorials."""

import keras
import numpy as np
from keras import layers, ops


class CausalAttention(layers.Layer):
    def __init__(self, dim, **kwargs):
        super().__init__(**kwargs)
        self.query = layers.Dense(dim)
        self.key = layers.Dense(dim)
        self.value = layers.Dense(dim)
        self.scale = dim**-0.5

    def call(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = ops.matmul(q, ops.transpose(k, (0, 2, 1))) * self.scale
        n = x.shape[1]
        mask = ops.cast(ops.tril(ops.ones((n, n))), scores.dtype)
        scores = scores + (1.0 - mask) * -1e9
        return x + ops.matmul(ops.softmax(scores), v)


def main(jit=False):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (64, 9))
    model = keras.Sequential(
        [
            layers.Embedding(20, 16),
            CausalAttention(16),
            layers.Dense(20, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    history = model.fit(x[:, :-1], x[:, 1:], epochs=4, verbose=0)
    return history.history["loss"]
