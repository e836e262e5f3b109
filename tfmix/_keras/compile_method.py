"""Replaces Keras's `compile`, and edits what a model saves of it.

It is replaced from the import of tfmix on, because copies and loaded files give
you models with 16-bit layers while no policy is active.
"""

import types
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import replacing, training

PLACE: replacing.Place = (training.TRAINER, "compile")
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
    is_of_class = type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    return is_of_class and model.optimizer.inner_optimizer is given


def save_argument(model: keras.Model, name: str, value: Any) -> None:
    """Replaces an argument of `compile` in the saved configuration."""
    saved = getattr(model, "_compile_config", None)
    if saved is not None:
        saved.config[name] = value
