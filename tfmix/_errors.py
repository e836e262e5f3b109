"""Exceptions of a training run; wrong arguments stay ValueError, TypeError."""

import os
import sys
import types

from tfmix import _messages

# Code that a user of tfmix cannot change.
_LIBRARIES = frozenset("keras tensorflow jax jaxlib numpy tfmix".split())
# What was said of which line.
_said: set[tuple[str, int, str]] = set()


class LossScaleError(RuntimeError):
    """Raised when loss scaling cannot make the gradients finite.

    The message names the variables whose gradients were not finite, most
    often first, and says what to change.
    """


def in_library(module: str) -> bool:
    """Says whether a module is one that users cannot change."""
    return module.split(".")[0] in _LIBRARIES


def warn(text: str) -> None:
    """Warns once of the innermost line that is in no library."""
    frame: types.FrameType | None = sys._getframe()
    while frame and in_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    file, line = ("?", 0) if frame is None else _place(frame)
    if (file, line, text) not in _said:
        _said.add((file, line, text))
        _messages.warn("%s (%s:%d)", text, os.path.basename(file), line)


def _place(frame: types.FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno
