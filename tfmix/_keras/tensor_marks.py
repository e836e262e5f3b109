"""Notes on tensors; also on JAX's arrays, which take no attributes.

Checked on Keras 3.12.4 and 3.15.1.
"""

import importlib
import numbers
from typing import Any

import numpy as np

_DATA = (numbers.Number, np.generic, np.ndarray)


def get(tensor: Any, name: str) -> Any:
    """Returns what was noted under a name, `None` if nothing was."""
    return _attributes().get_tensor_attr(tensor, name)


def put(tensor: Any, name: str, value: Any) -> None:
    """Notes a value under a name, for as long as the tensor lives.

    What is computed of the tensor has no note. Numbers and NumPy arrays, which
    a caller may hold as data, get none.
    """
    if tensor is not None and not isinstance(tensor, _DATA):
        _attributes().set_tensor_attr(tensor, name, value)


def _attributes() -> Any:
    return importlib.import_module("keras.src.backend.common.tensor_attributes")
