"""Callbacks that decide on a loss are not asked about what was not measured."""

import contextlib
import functools
import math
import warnings
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
            for callback in training.callbacks(original, args, kwargs):
                if isinstance(callback, keras.callbacks.TerminateOnNaN):
                    stop = functools.partial(
                        _stop, model, callback.on_batch_end
                    )
                    replacements.swap(undo, callback, "on_batch_end", stop)
                elif _decides(callback):
                    decide = functools.partial(_decide, model, callback)
                    decide = functools.partial(decide, callback.on_epoch_end)
                    replacements.swap(undo, callback, "on_epoch_end", decide)
            return original(*args, **kwargs)

    return wrapper


def _decides(callback: Any) -> bool:
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_best_only)
    kinds = keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau
    return isinstance(callback, kinds)


def _decide(
    model: keras.Model,
    callback: Any,
    original: Callable,
    epoch: int,
    logs: dict,
) -> None:
    """Ends an epoch for a callback, to which NaN would be the best for ever."""
    value = (logs or {}).get(callback.monitor, 0.0)
    if math.isfinite(value) or not _skips(model):
        original(epoch, logs)
    elif not isinstance(callback, keras.callbacks.ModelCheckpoint):
        rest = {**logs, callback.monitor: None}
        with warnings.catch_warnings():
            # That it misses what it monitors.
            warnings.simplefilter("ignore")
            original(epoch, rest)
        logs.update({**rest, callback.monitor: value})


def _stop(
    model: keras.Model, original: Callable, batch: int, logs: Any = None
) -> None:
    loss = (logs or {}).get("loss", 0.0)
    if math.isfinite(loss):
        return
    if not 0 < _skips(model) < _NOT_BY_ACCIDENT:
        original(batch, logs)


def _skips(model: keras.Model) -> int:
    """Returns how many steps were skipped in a row just now."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    return int(getattr(model.optimizer, "consecutive_skips", 0))
