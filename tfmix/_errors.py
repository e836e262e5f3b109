"""Exceptions of a training run; wrong arguments stay ValueError, TypeError."""

import sys
import types
import warnings

# Code that a user of tfmix cannot change.
_LIBRARIES = frozenset("keras tensorflow jax jaxlib numpy tfmix".split())


class LossScaleError(RuntimeError):
    """Raised when loss scaling cannot make the gradients finite.

    The message names the variables whose gradients were not finite, most
    often first, and says what to change.
    """


def in_library(module: str) -> bool:
    """Says whether a module is one that users cannot change."""
    return module.split(".")[0] in _LIBRARIES


def warn(text: str) -> None:
    """Warns at the innermost line that is in no library."""
    level = 1
    frame: types.FrameType | None = sys._getframe()
    while frame and in_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
