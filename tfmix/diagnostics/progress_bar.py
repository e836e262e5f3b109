"""What Keras's progress bar is told, and how a warning stays clear of it."""

from typing import Any

import keras

from tfmix import _messages


class Shown(float):
    """A number that the progress bar prints as it is if it is whole.

    The bar divides each by a count of one and asks for four digits.
    """

    def __truediv__(self, other: Any) -> "Shown":
        return Shown(float(self) / other)

    def __format__(self, spec: str) -> str:
        asked_by_bar = spec in (".4f", ".4e") and self.is_integer()
        return str(int(self)) if asked_by_bar else super().__format__(spec)

    def __str__(self) -> str:
        return str(int(self)) if self.is_integer() else super().__repr__()


def warn(callback: keras.callbacks.Callback, text: str, *values: Any) -> None:
    """Says a warning, on a line of its own where the bar is drawn."""
    if (callback.params or {}).get("verbose") in (1, "auto"):
        print(flush=True)
    _messages.warn(text, *values)
