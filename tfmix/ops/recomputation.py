"""Runs users' gradient code under the settings of the layer's call.

The gradient of a `tf.custom_gradient` is the user's code and runs after the
layer's call. Its variables would be read in float32, and no rule would be
active. `tf.recompute_grad` (`keras.remat`, `keras.RematScope`) is such a
function: it runs the layer's own code again.
"""

import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any

from tfmix._keras import global_state, gradients

PLACES = gradients.CUSTOM


def alike(original: Callable, block_as_now: Callable) -> Callable:
    """Returns a recorder of custom gradients that keeps the call's settings.

    Args:
        original: TensorFlow's recorder. It calls a user's function, which
            returns a result and its gradient function.
        block_as_now: Function that returns a function, which opens a block with
            the replacements of now.
    """

    @functools.wraps(original)
    def record(f: Callable, args: Any, kwargs: Any) -> Any:
        @functools.wraps(f)
        def function(*args: Any, **kwargs: Any) -> tuple[Any, Callable]:
            result, gradient = f(*args, **kwargs)
            return result, _as_now(gradient, block_as_now())

        return original(function, args, kwargs)

    return record


def _as_now(gradient: Callable, block: Callable) -> Callable:
    """Returns a function that runs with the settings of the current call."""
    state, context = global_state.call_state(), contextvars.copy_context()

    def as_called(*args: Any, **kwargs: Any) -> Any:
        with block(), global_state.as_called(state):
            return gradient(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        # A context cannot be entered twice at a time, as second order would.
        return context.copy().run(as_called, *args, **kwargs)

    # TensorFlow looks for an argument `variables`. mypy does not know this
    # attribute of functions.
    run.__signature__ = inspect.signature(gradient)  # type: ignore[attr-defined]
    return run
