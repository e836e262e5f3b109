"""Which line of the user's own code a message is about."""

import linecache
import os
import re
import sys
import traceback
import types

from tfmix import _messages

# Code that a user of tfmix cannot change.
_LIBRARIES = frozenset("keras tensorflow jax jaxlib numpy tfmix".split())
# How AutoGraph, which runs a copy of the code, names a line of the code itself.
_CONVERTED = re.compile(r'File "(.+)", line (\d+), in .+  \*$', re.MULTILINE)


def in_library(module: str) -> bool:
    """Says whether a module is one that users cannot change."""
    return module.split(".")[0] in _LIBRARIES


def users_line(error: Exception) -> str:
    """Returns the innermost line of an error that is in no library."""
    if converted := _CONVERTED.findall(str(error)):
        file, number = converted[-1]
        return line_of(file, int(number))
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        if not in_library(frame.f_globals.get("__name__", "")):
            return line_of(frame.f_code.co_filename, line)
    return ""


def line_of(file: str, line: int | None) -> str:
    """Returns a line of a file with its place, to open a sentence on it."""
    code = linecache.getline(file, line or 0).strip()
    shown = f" `{code}`" if code else ""
    return f"{os.path.basename(file)}:{line}{shown}: "


def warn(text: str) -> None:
    """Warns once of the innermost line that is in no library."""
    frame: types.FrameType | None = sys._getframe()
    while frame and in_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    file, line = ("?", 0) if frame is None else _place(frame)
    place = os.path.basename(file), line
    _messages.warn_once("%s (%s:%d)", text, *place, about=(file, line, text))


def _place(frame: types.FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno
