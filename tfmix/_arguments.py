"""Checks of arguments, with errors that say what is allowed."""

import numbers
from typing import Any

from tfmix import _formats


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number, such as 1024.0. "
            f"Received: {name}={value!r} of type {type(value).__name__}."
        )
    return float(value)


def positive(name: str, value: Any) -> float:
    value = number(name, value)
    if not 0.0 < value <= _formats.FLOAT32.max:
        raise ValueError(
            f"`{name}` must be positive and finite, such as 1024.0. "
            f"Received: {name}={value!r}."
        )
    return value


def count(
    name: str, value: Any, *, lowest: int = 1, example: int | None = None
) -> int:
    such = "" if example is None else f", such as {example}"
    message = (
        f"`{name}` must be an integer of {lowest} or more{such}. "
        f"Received: {name}={value!r}"
    )
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{message} of type {type(value).__name__}.")
    if value < lowest:
        raise ValueError(f"{message}.")
    return int(value)
