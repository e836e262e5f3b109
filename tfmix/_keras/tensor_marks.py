"""Notes on tensors; also on JAX's arrays, which take no attributes.

Checked on Keras 3.12.4 and 3.15.1.
"""

import importlib
from typing import Any


def get(tensor: Any, name: str) -> Any:
    """Returns what was noted under a name, `None` if nothing was."""
    return _attributes().get_tensor_attr(tensor, name)


def put(tensor: Any, name: str, value: Any) -> None:
    """Notes a value under a name, for as long as the tensor lives."""
    _attributes().set_tensor_attr(tensor, name, value)


def _attributes() -> Any:
    return importlib.import_module("keras.src.backend.common.tensor_attributes")
