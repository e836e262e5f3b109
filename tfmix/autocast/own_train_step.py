"""A `train_step` that its user wrote, where it mixes dtypes."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import layers, training
from tfmix.autocast import own_code


class _First:
    """Stands in for a `train_function` until its first step."""

    def __init__(self, function: Callable, step: Callable) -> None:
        functools.update_wrapper(self, function)
        self._step = step

    def __call__(self, *arguments: Any) -> Any:
        return self._step(*arguments)


def traced(
    model: keras.Model, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Makes a train function, whose `train_step` may be traced a second time.

    `original` is the model's `make_train_function`. If a `train_step` of the
    user's own fails in its first step, that is traced anew on layers that
    hand float32 on to it.
    """
    original(*args, **kwargs)
    function = model.train_function
    if not training.has_own_step(model) or isinstance(function, _First):
        return function

    def trace_anew(*arguments: Any) -> Any:
        # So that nothing of the failed trace runs.
        original(force=True)
        return model.train_function(*arguments)

    def step(*arguments: Any) -> Any:
        built = layers.is_built(model)
        arguments = training.for_two_calls(model, arguments)
        try:
            logs = function(*arguments)
        except Exception as error:
            if not built:
                # Variables made in a failed trace have no value.
                raise
            trace = functools.partial(trace_anew, *arguments)
            return own_code.mended_step(model, error, trace)
        if model.train_function is first:
            model.train_function = function
        return logs

    first = model.train_function = _First(function, step)
    return first
