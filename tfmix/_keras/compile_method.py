"""Keras's `compile`, and what tfmix lets it do for every 16-bit model.

From the first 16-bit policy of a process, or the first file of a guarded
model, on: copies and loaded models come about where no policy is active.
"""

import functools
from collections.abc import Callable
from typing import Any

from tfmix._keras import replacements, training

PLACE: replacements.Place = (training.TRAINER, "compile")
_Compile = Callable[..., None]
_replacements = replacements.Replacements()
_makers: list[Callable[[_Compile], _Compile]] = []


def use(make: Callable[[_Compile], _Compile]) -> None:
    """Sets what makes the stand-in out of Keras's own method."""
    _makers[:] = [make]


def stand_by() -> None:
    """Puts the stand-in in its place, until `stand_down`."""
    _replacements.set({PLACE: _stand_in})


def _stand_in(original: _Compile) -> _Compile:
    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        (make,) = _makers
        make(original)(self, *args, **kwargs)

    return compile


def stand_down() -> None:
    """Gives Keras its own method back."""
    _replacements.set({})
