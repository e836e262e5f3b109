"""Code that TensorFlow runs again for a gradient runs as it did before.

`tf.recompute_grad` (`keras.remat`, `keras.RematScope`) runs a function once
more in the backward pass. The call of the layer around it is over by then:
its variables would be read in float32, and no rule would be in force.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import layers, replacements

PLACES: tuple[replacements.Place, ...] = ()
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    PLACES = ((tf, "recompute_grad"),)


def alike(original: Callable) -> Callable:
    """Returns a `tf.recompute_grad` whose second run is as the first."""

    @functools.wraps(original)
    def recompute_grad(f: Callable) -> Callable:
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            state, context = layers.call_state(), contextvars.copy_context()

            def as_first(*args: Any, **kwargs: Any) -> Any:
                with layers.as_called(state):
                    return f(*args, **kwargs)

            def run(*args: Any, **kwargs: Any) -> Any:
                # No context is entered twice at a time, as in a second order.
                return context.copy().run(as_first, *args, **kwargs)

            return original(run)(*args, **kwargs)

        # As `functools.wraps` would; mypy knows no attributes of functions.
        recomputed.__wrapped__ = f  # type: ignore[attr-defined]
        return recomputed

    return recompute_grad
