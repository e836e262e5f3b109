"""Keeps TensorFlow's AutoGraph from rewriting functions of ours.

A user's `tf.function` is rewritten together with all that it calls. Ours hold
no Python control flow on tensors; to rewrite them costs time, and prints
warnings where AutoGraph does not know a newer Python's syntax.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import keras

Function = TypeVar("Function", bound=Callable[..., Any])


def untouched(function: Function) -> Function:
    """Returns the function, to be run by AutoGraph as it is written."""
    if keras.backend.backend() != "tensorflow":
        return function
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)
