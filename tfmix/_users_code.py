"""Finds the line of the user's code that a message is about."""

import linecache
import os
import re
import sys
import traceback
import types

from tfmix import _messages
from tfmix._keras import layers

# AutoGraph runs a copy of the code. In its errors, the lines of the original
# end like this.
_CONVERTED = re.compile(r'File "(.+)", line (\d+), in .+  \*$', re.MULTILINE)


def users_line(error: Exception) -> str:
    """Returns the innermost line of a traceback that is outside libraries."""
    if converted := _CONVERTED.findall(str(error)):
        file, number = converted[-1]
        return line_of(file, int(number))
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        if not layers.in_library(frame.f_globals.get("__name__", "")):
            return line_of(frame.f_code.co_filename, line)
    return ""


def line_of(file: str, line: int | None) -> str:
    """Returns a file's name, a line number and the line, to open a message."""
    code = linecache.getline(file, line or 0).strip()
    shown = f" `{code}`" if code else ""
    return f"{os.path.basename(file)}:{line}{shown}: "


def warn(text: str) -> None:
    """Warns once per line of the user's code, and names the line."""
    frame: types.FrameType | None = sys._getframe()
    while frame and layers.in_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    file, line = "?", 0
    if frame:
        file, line = frame.f_code.co_filename, frame.f_lineno
    place = os.path.basename(file), line
    _messages.warn_once("%s (%s:%d)", text, *place, about=(file, line, text))
