"""Keeps XLA from spending minutes on code that runs once, under JAX."""

import contextlib

import keras
import numpy as np
import pytest

OPTION = "jax_disable_most_optimizations"


@contextlib.contextmanager
def quick_compile():
    """Skips XLA's slowest work; does nothing under TensorFlow.

    Compiling the random initializer for a new shape takes a second, and most
    of a step's compilation is optimisation.
    """
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    before = jax.config.values[OPTION]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.initializers.VarianceScaling, "__call__", _draw)
        jax.config.update(OPTION, True)
        try:
            yield
        finally:
            jax.config.update(OPTION, before)


def _draw(self, shape, dtype="float32"):
    """Glorot's uniform distribution, drawn by NumPy."""
    generator = np.random.default_rng(shape[-1])
    fans = np.prod(shape[:-1]) + shape[-1]
    values = generator.uniform(-1, 1, shape) * np.sqrt(6 / fans)
    return keras.ops.convert_to_tensor(values.astype("float32"), dtype)
