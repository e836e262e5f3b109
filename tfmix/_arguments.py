"""Checks arguments."""

import difflib
import numbers
from collections.abc import Sequence
from typing import Any

import keras

# The highest loss scale. XLA multiplies its reciprocal by the learning rate and
# flushes a product below 2.0**-126 to zero.
HIGHEST = 2.0**100


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number, such as 1024.0. "
            f"Received: {name}={value!r} of type {type(value).__name__}."
        )
    return float(value)


def positive(name: str, value: Any) -> float:
    value = number(name, value)
    if not 0.0 < value <= HIGHEST:
        raise ValueError(
            f"`{name}` must be positive and at most 2.0**100, such as 1024.0. "
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


def model(value: Any) -> None:
    """Raises a `TypeError` for anything but a Keras 3 model."""
    if isinstance(value, keras.Model):
        return
    hint = ""
    if isinstance(value, keras.Layer):
        hint = " Put the layer into a model, or set its `dtype_policy`."
    elif "tf_keras" in type(value).__module__:
        hint = " It is a model of tf_keras (Keras 2), which is not supported."
    raise TypeError(
        "`model` must be a Keras 3 model (keras.Model). Received: "
        f"model={value!r} of type {type(value).__name__}.{hint}"
    )


def did_you_mean(name: object, known: Sequence[str]) -> str:
    """Returns a hint such as " Did you mean 'x'?", "" if no name is close."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
