"""A model's methods that its user wrote, where they mix dtypes."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _users_code
from tfmix._keras import global_state, layers, training
from tfmix.in_force.layer import dtype_errors, fallback


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
    user's own mixes dtypes in its first step, that is traced anew on layers
    that hand float32 on to it.
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
            return fallback.mended_step(model, error, trace)
        if model.train_function is first:
            model.train_function = function
        return logs

    first = model.train_function = _First(function, step)
    return first


def explained(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Says what to write where a method besides `call` mixes dtypes."""
    try:
        return original(*args, **kwargs)
    except Exception as error:
        is_new = not getattr(error, "__notes__", None)
        outside = is_new and global_state.entry_layer() is None
        if outside and dtype_errors.is_about_dtypes(error):
            error.add_note(
                f"tfmix: {_users_code.users_line(error)}outside of "
                "`call` layers return 16 bit and weights are float32. "
                "Write keras.ops.cast(weight, x.dtype) there, or "
                "keras.ops.cast(x, 'float32') for the layer's result."
            )
        raise
