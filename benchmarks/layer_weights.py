"""Initial weights for layers under JAX, without compilation."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np

_RANDOM = ("VarianceScaling", "RandomUniform", "RandomNormal", "Orthogonal")


@contextlib.contextmanager
def drawn_by_numpy() -> Iterator[None]:
    """Draws weights with NumPy; does nothing under TensorFlow.

    XLA takes a second to compile the random draw of every new shape.
    """
    with contextlib.ExitStack() as stack:
        if keras.backend.backend() == "jax":
            for name in _RANDOM:
                initializer = getattr(keras.initializers, name)
                stack.enter_context(
                    mock.patch.object(initializer, "__call__", _draw)
                )
        yield


def _draw(self: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Glorot's uniform distribution."""
    generator = np.random.default_rng(7)
    fans = np.prod(shape[:-1], dtype=float) + shape[-1]
    values = generator.uniform(-1, 1, shape) * np.sqrt(6 / fans)
    return keras.ops.convert_to_tensor(values.astype("float32"), dtype)
