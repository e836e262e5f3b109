"""Homogeneous coordinates: `ops.ones` and `ops.arange` made in `call`."""

from keras import layers, ops

from tests.wild import _fit


class Extended(layers.Layer):
    def call(self, x):
        n = ops.shape(x)[0]
        steps = ops.tile(
            ops.reshape(ops.arange(8, dtype="float32"), (1, 8)), (n, 1)
        )
        return ops.concatenate([x, ops.ones((n, 1)), steps / 8.0], axis=-1)


def main(jit=False):
    return _fit.rows(layers.Dense(8), Extended(), jit=jit)
