"""Masked max pooling, with -1e30 where there is padding."""

from keras import layers, ops

from tests.wild import _fit


class MaskedMax(layers.Layer):
    def call(self, x):
        present = ops.any(ops.not_equal(x, 0), axis=-1, keepdims=True)
        return ops.max(ops.where(present, x, -1e30), axis=1)


def main(jit=False):
    return _fit.tokens(layers.Embedding(20, 16), MaskedMax(), jit=jit)
