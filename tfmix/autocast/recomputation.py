"""Code that runs in the backward pass under TensorFlow is cast as before.

The gradient of a `tf.custom_gradient` is the user's code, which runs after the
layer's call is over: its variables would be read in float32, and no rule would
be in force. `tf.recompute_grad` (`keras.remat`, `keras.RematScope`) is one that
runs the layer's own code once more.
"""

import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any

from tfmix._keras import gradients, layers

PLACES = gradients.CUSTOM


def alike(original: Callable) -> Callable:
    """Returns what records a custom gradient, which runs as its function did.

    Args:
        original: TensorFlow's, which calls a function of the user's that
            returns a result and the function of its gradient.
    """

    @functools.wraps(original)
    def record(f: Callable, args: Any, kwargs: Any) -> Any:
        @functools.wraps(f)
        def function(*args: Any, **kwargs: Any) -> tuple[Any, Callable]:
            result, gradient = f(*args, **kwargs)
            return result, _as_now(gradient)

        return original(function, args, kwargs)

    return record


def _as_now(gradient: Callable) -> Callable:
    """Returns a function that runs as a part of the call that runs now."""
    state, context = layers.call_state(), contextvars.copy_context()

    def as_called(*args: Any, **kwargs: Any) -> Any:
        with layers.as_called(state):
            return gradient(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        # No context is entered twice at a time, as in a second order.
        return context.copy().run(as_called, *args, **kwargs)

    # TensorFlow looks for an argument `variables`; mypy knows no such attribute
    # of a function.
    run.__signature__ = inspect.signature(gradient)  # type: ignore[attr-defined]
    return run
