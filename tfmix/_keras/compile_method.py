"""Replaces Keras's `compile`, and edits what a model saves of it.

It is replaced from the import of tfmix on, because copies and loaded files give
you models with 16-bit layers while no policy is active.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import keras
from keras.src.legacy.saving import saving_utils

from tfmix._keras import optimizers, replacing, training

PLACE: replacing.Place = (training.TRAINER, "compile")
# It describes a model for a file of the old format, `.h5`.
OLD_FORMAT: replacing.Place = (saving_utils, "model_metadata")
_replacements = replacing.Replacements()
_makers: list[Callable] = []


def use(make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Sets the function that makes the replacement from Keras's method."""
    _makers[:] = [make]


def watch() -> None:
    """Replaces `compile`, until `stop_watching`."""
    places = replacing.definers(keras.Model, "compile")
    _replacements.set({place: make for place in places for make in _makers})


def stop_watching() -> None:
    """Restores Keras's own method."""
    _replacements.set({})


def while_watched(
    model: keras.Model, original: Callable, *args: Any, **kwargs: Any
) -> None:
    """Calls a model's `compile` while that of Keras is replaced."""
    # A record outlasts `set_global_policy("float32")`, which restores it.
    was_watching = bool(_replacements.places())
    is_of_class = getattr(original, "__func__", None) is type(model).compile
    watch()
    if is_of_class:
        original = types.MethodType(type(model).compile, model)
    try:
        original(*args, **kwargs)
    finally:
        if not was_watching:
            stop_watching()


def adopt_optimizer(model: keras.Model, optimizer: Any, saved: Any) -> None:
    """Sets the optimizer of a compiled model, and the one its files name."""
    model.optimizer = optimizer
    save_argument(model, "optimizer", saved)


def has_wrapped(model: keras.Model) -> bool:
    """Returns whether Keras has put its own loss scale around the optimizer."""
    saved = getattr(model, "_compile_config", None)
    given = None if saved is None else saved.config.get("optimizer")
    is_of_class = type(model.optimizer) is optimizers.KerasScaler
    return is_of_class and model.optimizer.inner_optimizer is given


def save_argument(model: keras.Model, name: str, value: Any) -> None:
    """Replaces an argument of `compile` in the saved configuration."""
    saved = getattr(model, "_compile_config", None)
    if saved is not None:
        saved.config[name] = value


def naming_saved_optimizer(original: Callable) -> Callable:
    """Returns what describes a model with the optimizer that its files name."""

    @functools.wraps(original)
    def model_metadata(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        compiled = getattr(model, "_compile_config", None)
        saved = None if compiled is None else compiled.config.get("optimizer")
        inside = [*optimizers.chain(getattr(model, "optimizer", None))][1:]
        with contextlib.ExitStack() as undo:
            if any(saved is inner for inner in inside):
                replacing.swap(undo, model, "optimizer", saved)
                # Keras takes it out.
                undo.callback(save_argument, model, "optimizer", saved)
            return original(model, *args, **kwargs)

    return model_metadata
