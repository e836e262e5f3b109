"""Keras's `compile`: what tfmix lets it do, and what a model saves of it.

tfmix watches it from its import on: models with 16-bit layers come about where
no policy is active, as copies and from files.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import replacements, training

PLACE: replacements.Place = (training.TRAINER, "compile")
_replacements = replacements.Replacements()
_wanted: dict[replacements.Place, Callable] = {}


def use(make: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Sets what makes the stand-in out of Keras's own method."""
    _wanted[PLACE] = make


def watch() -> None:
    """Puts the stand-in in its place, until `stop_watching`."""
    _replacements.set(_wanted)


def stop_watching() -> None:
    """Gives Keras its own method back."""
    _replacements.set({})


def adopt_optimizer(model: keras.Model, optimizer: Any) -> None:
    """Makes an optimizer the compiled model's, also in what it saves."""
    # Keras would save the one `compile` was given, without its state.
    model.optimizer = optimizer
    save_argument(model, "optimizer", optimizer)


def save_argument(model: keras.Model, name: str, value: Any) -> None:
    """Sets an argument of `compile` in what a model saves of it."""
    saved = getattr(model, "_compile_config", None)
    if saved is not None:
        saved.config[name] = value
