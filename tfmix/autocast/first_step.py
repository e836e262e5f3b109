"""Explains a first step that takes long, and retries one that fails.

A user's own `train_step` may mix dtypes. It is then traced a second time.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import layers, optimizers, training
from tfmix.autocast import fallback
from tfmix.optimizers import low_memory

# A first step shorter than this, in seconds, needs no explanation.
_LONG = 20.0


def watched(
    model: keras.Model,
    original: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes a train function whose first call is explained and retried.

    `original` is the model's `make_train_function`. Later calls go to the
    function that it made.
    """
    before = model.train_function
    original(*args, **kwargs)
    function = model.train_function
    if function is before:
        return function
    is_done = False

    def anew(*arguments: Any) -> Any:
        nonlocal function
        # Otherwise a part of the failed trace could run.
        original(force=True)
        function = model.train_function
        return function(*arguments)

    def first(*arguments: Any) -> Any:
        nonlocal is_done
        if is_done:
            # A callback has stored this function.
            return function(*arguments)
        is_done = True
        with _explained(model):
            logs = _retried(model, function, anew, arguments)
        # A callback may have replaced it.
        if model.train_function is first:
            model.train_function = function
        return logs

    model.train_function = first
    return first


def _retried(
    model: keras.Model, function: Callable, anew: Callable, arguments: tuple
) -> Any:
    """Runs a step; traces a user's own again, on layers that return float32."""
    if not training.has_own_step(model):
        return function(*arguments)
    built = layers.is_built(model)
    arguments = training.for_two_calls(model, arguments)
    try:
        return function(*arguments)
    except Exception as error:
        if not built:
            # Variables created in a failed trace have no value.
            raise
        trace = functools.partial(anew, *arguments)
        return fallback.trace_again(model, error, trace)


@contextlib.contextmanager
def _explained(model: keras.Model) -> Iterator[None]:
    def say() -> None:
        _messages.warn(
            "the first step has taken %g s so far. It waits for %s, or for the "
            "first batch of data. Later steps do not wait.",
            _LONG,
            _cause(model),
        )

    timer = threading.Timer(_LONG, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _cause(model: keras.Model) -> str:
    """Returns what takes longest in a first step, by measurements."""
    is_xla = keras.backend.backend() == "jax" or model.jit_compile
    if not is_xla:
        return "TensorFlow, which builds its graph"
    nested = optimizers.with_nested(model.optimizer)
    if any(isinstance(one, low_memory.LowMemoryOptimizer) for one in nested):
        # It took 114 s on an H100, and 42 s with Adam.
        return "XLA, which compiles the 8-bit optimizer state of each variable"
    return "XLA, which compiles it"
