"""Prints numbers in Keras's progress bar, and warnings below it."""

from typing import Any

import keras

from tfmix import _messages


class Shown(float):
    """A number that the progress bar prints without digits if it is whole.

    The bar divides each number by a count of one and asks for four digits.
    """

    def __truediv__(self, other: Any) -> "Shown":
        return Shown(float(self) / other)

    def __format__(self, spec: str) -> str:
        is_whole = spec in (".4f", ".4e") and self.is_integer()
        return str(int(self)) if is_whole else super().__format__(spec)

    def __str__(self) -> str:
        return str(int(self)) if self.is_integer() else super().__repr__()


def warn(callback: keras.callbacks.Callback, text: str, *values: Any) -> None:
    """Logs a warning, on a new line if the progress bar is shown."""
    if (callback.params or {}).get("verbose") in (1, "auto"):
        print(flush=True)
    _messages.warn(text, *values)
