"""`TerminateOnNaN` stops a run that is stuck, not at its first bad batch."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import replacements, training

# So many skipped steps in a row are no accident.
_NOT_BY_ACCIDENT = 3


def fit(model: keras.Model) -> Callable[..., Any]:
    """Returns what stands around a model's `fit`."""

    def wrapper(original: Callable, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as undo:
            for each in training.callbacks(original, args, kwargs):
                if isinstance(each, keras.callbacks.TerminateOnNaN):
                    stop = functools.partial(_stop, model, each.on_batch_end)
                    replacements.swap(undo, each, "on_batch_end", stop)
            return original(*args, **kwargs)

    return wrapper


def _stop(
    model: keras.Model, original: Callable, batch: int, logs: Any = None
) -> None:
    if math.isfinite((logs or {}).get("loss", 0.0)):
        return
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    skips = getattr(model.optimizer, "consecutive_skips", 0)
    if not 0 < skips < _NOT_BY_ACCIDENT:
        original(batch, logs)
