"""Notes on tensors; also on JAX's arrays, which take no attributes."""

import numbers
from typing import Any

import numpy as np
from keras.src.backend.common import tensor_attributes

_DATA = (numbers.Number, np.generic, np.ndarray)


def get(tensor: Any, name: str) -> Any:
    """Returns what was noted under a name, `None` if nothing was."""
    return tensor_attributes.get_tensor_attr(tensor, name)


def put(tensor: Any, name: str, value: Any) -> None:
    """Notes a value for as long as a tensor lives; its results have no note."""
    # Numbers and NumPy arrays, which a caller may hold as data, get none.
    if tensor is not None and not isinstance(tensor, _DATA):
        tensor_attributes.set_tensor_attr(tensor, name, value)
