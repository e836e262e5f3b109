"""Choices made on the host when that can be, else in the compiled step."""

import numbers
from typing import Any

import numpy as np
from keras import ops


def is_number(value: Any) -> bool:
    """Returns whether a value is known now, not a tensor to come."""
    return isinstance(value, numbers.Number | np.generic | np.ndarray)


def constant_like(number: np.float32, like: Any) -> Any:
    """Returns the number as what `like` is: a number or a tensor."""
    return number if is_number(like) else ops.convert_to_tensor(number)


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Returns one of two values, numbers or scalar tensors."""
    if is_number(condition):
        return if_true if condition else if_false
    return ops.where(condition, if_true, if_false)
