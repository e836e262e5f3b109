"""Float constants in the code of a layer, and where that code is."""

import dis
import inspect
import linecache
import math
import os
import re
import traceback
import types
from collections.abc import Iterator

import keras

from tfmix import _errors, _formats

# Code that tells formats apart chooses its constants by them.
_TELLS_APART = frozenset(("float16", "mixed_float16", "finfo"))
# The operation whose gradient is that of x**-0.5, and where it may be computed.
_ROOT, _WIDE = "rsqrt", "float32"
# How AutoGraph, which runs a copy of the code, names a line of the code itself.
_CONVERTED = re.compile(r'File "(.+)", line (\d+), in .+  \*$', re.MULTILINE)


def unfit(layer: keras.Layer, dtype: str) -> tuple[str, str] | None:
    """Says where a layer's code holds a constant that a dtype does not.

    Returns:
        Place and cause, and what to write; `None` if every constant fits: is
        not infinite, and not zero, if it is not in float32. An epsilon in code
        that takes reciprocal roots fits if their gradient there is finite.
    """
    limits = _formats.limits(dtype)
    for function in _functions(layer):
        words = {*_strings(function.__code__)}
        if _TELLS_APART & words:
            continue
        takes_root = _ROOT in words and _WIDE not in words
        for value, line in _constants(function, layer):
            size = abs(value)
            # The halves are where rounding to nearest turns.
            if size > limits.max and math.isfinite(size):
                cause = f"{value!r} is infinite"
                such = math.copysign(limits.max / 2, value)
                fits = f"within +-{limits.max:g}, such as {such:.0e}"
            elif 0 < size <= limits.smallest / 2:
                cause = f"{value!r} is 0"
                fits = f"of {limits.smallest:.0e} or more"
            elif takes_root and 0 < size < limits.max ** (-2 / 3):
                cause = f"the gradient of {_ROOT}({value!r}) is infinite"
                fits = f"of {1.1 * limits.max ** (-2 / 3):.0e} or more"
            else:
                continue
            place = _place(function.__code__.co_filename, line)
            return f"{place}{cause} in {dtype}.", f"take a constant {fits}"
    return None


def users_line(error: Exception) -> str:
    """Returns the innermost line of an error that is in no library."""
    if converted := _CONVERTED.findall(str(error)):
        file, number = converted[-1]
        return _place(file, int(number))
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, line in reversed(frames):
        if not _errors.in_library(frame.f_globals.get("__name__", "")):
            return _place(frame.f_code.co_filename, line)
    return ""


def _place(file: str, line: int | None) -> str:
    code = linecache.getline(file, line or 0).strip()
    shown = f" `{code}`" if code else ""
    return f"{os.path.basename(file)}:{line}{shown}: "


def _functions(layer: keras.Layer) -> Iterator[types.FunctionType]:
    """Yields the user's functions that a layer's `call` may run, each once."""
    start = layer.function if isinstance(layer, keras.layers.Lambda) else None
    waiting = [start if start is not None else type(layer).call]
    seen: set[int] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            continue
        if id(function) in seen or _errors.in_library(
            function.__module__ or ""
        ):
            continue
        seen.add(id(function))
        yield function
        for name in _names(function.__code__):
            found = inspect.getattr_static(type(layer), name, None)
            waiting += [found, function.__globals__.get(name)]


def _constants(
    function: types.FunctionType, layer: keras.Layer
) -> Iterator[tuple[float, int | None]]:
    code, first = function.__code__, function.__code__.co_firstlineno
    for each in _codes(code):
        line: int | None = first
        for step in dis.get_instructions(each):
            line = step.positions.lineno if step.positions else line
            value = step.argval
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                value = vars(layer).get(value)
            elif step.opname == "LOAD_GLOBAL":
                value = function.__globals__.get(value)
            if isinstance(value, float):
                yield value, line
    defaults = (*(function.__defaults__ or ()),)
    defaults += (*(function.__kwdefaults__ or {}).values(),)
    captured = inspect.getclosurevars(function).nonlocals.values()
    for value in (*defaults, *captured):
        if isinstance(value, float):
            yield value, first


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names(code: types.CodeType) -> Iterator[str]:
    for each in _codes(code):
        yield from each.co_names


def _strings(code: types.CodeType) -> Iterator[str]:
    for each in _codes(code):
        yield from (c for c in each.co_consts if isinstance(c, str))
        yield from each.co_names
