"""Retries a user's own `train_step` if it mixes dtypes."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import layers, training
from tfmix.autocast import float32_fallback


class _First:
    """Replaces a `train_function` until its first step."""

    def __init__(self, function: Callable, step: Callable) -> None:
        functools.update_wrapper(self, function)
        self._step = step

    def __call__(self, *arguments: Any) -> Any:
        return self._step(*arguments)


def traced(
    model: keras.Model, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Makes a train function that may trace its `train_step` a second time.

    `original` is the model's `make_train_function`. If a user's own
    `train_step` fails in its first step, it is traced again on layers that
    return float32 to it.
    """
    original(*args, **kwargs)
    function = model.train_function
    if not training.has_own_step(model) or isinstance(function, _First):
        return function

    def trace_anew(*arguments: Any) -> Any:
        # Otherwise a part of the failed trace could run.
        original(force=True)
        return model.train_function(*arguments)

    def step(*arguments: Any) -> Any:
        built = layers.is_built(model)
        arguments = training.for_two_calls(model, arguments)
        try:
            logs = function(*arguments)
        except Exception as error:
            if not built:
                # Variables created in a failed trace have no value.
                raise
            trace = functools.partial(trace_anew, *arguments)
            return float32_fallback.trace_again(model, error, trace)
        if model.train_function is first:
            model.train_function = function
        return logs

    first = model.train_function = _First(function, step)
    return first
