"""Keras's `compile`: what tfmix lets it do, and what a model saves of it.

From the first 16-bit policy of a process on: copies and loaded models come
about where no policy is active. A guarded model's file has it for that alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import replacements, training

PLACE: replacements.Place = (training.TRAINER, "compile")
_Compile = Callable[..., None]
_replacements = replacements.Replacements()
_makers: list[Callable[[_Compile], _Compile]] = []
# Whether it outlasts the policies in force, for what was made under them.
_lasts = False
# Whether it is there for the next `compile` alone.
_once = False


def use(make: Callable[[_Compile], _Compile]) -> None:
    """Sets what makes the stand-in out of Keras's own method."""
    _makers[:] = [make]


def stand_by(*, lasts: bool = True) -> None:
    """Puts the stand-in in its place, until `stand_down`.

    One that need not last goes with a scope that ends in an error, too.
    """
    global _lasts, _once
    _lasts, _once = _lasts or lasts, False
    _replacements.set({PLACE: _stand_in})


def stand_by_once() -> None:
    """Puts the stand-in in its place for the next `compile`, if none is."""
    global _once
    if not _replacements.places():
        _once = True
        _replacements.set({PLACE: _stand_in})


def _stand_in(original: _Compile) -> _Compile:
    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        (make,) = _makers
        try:
            make(original)(self, *args, **kwargs)
        finally:
            if _once:
                stand_down()

    return compile


def stand_down() -> None:
    """Gives Keras its own method back."""
    global _lasts, _once
    _lasts = _once = False
    _replacements.set({})


def end_scope(*, failed: bool, in_force: bool) -> None:
    """Keeps the stand-in for what a scope has made, if that did not fail.

    Args:
        failed: Whether an error ended the scope.
        in_force: Whether a policy is in force after it.
    """
    global _lasts
    if _replacements.places() and not failed:
        _lasts = True
    elif not (_lasts or in_force):
        stand_down()


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
