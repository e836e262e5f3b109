"""The float constants, and the words, in the code that a layer runs."""

import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

import keras

from tfmix import _users_code


def functions(layer: Any) -> Iterator[types.FunctionType]:
    """Yields the user's functions that a layer's `call` may run, each once."""
    start = layer.function if isinstance(layer, keras.layers.Lambda) else None
    waiting = [start if start is not None else type(layer).call]
    seen: set[int] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            continue
        if id(function) in seen or _users_code.in_library(
            function.__module__ or ""
        ):
            continue
        seen.add(id(function))
        yield function
        for code in _codes(function.__code__):
            for name in code.co_names:
                method = inspect.getattr_static(type(layer), name, None)
                waiting += [method, function.__globals__.get(name)]


def floats(
    function: types.FunctionType, layer: Any
) -> Iterator[tuple[float, int | None]]:
    """Yields the floats that a function of a layer reads, with their lines.

    They are written there, attributes of the layer, globals, defaults, or
    captured.
    """
    first = function.__code__.co_firstlineno
    for code in _codes(function.__code__):
        line: int | None = first
        for step in dis.get_instructions(code):
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


def words(function: types.FunctionType) -> set[str]:
    """Returns the strings and the names in a function's code."""
    return {
        word
        for code in _codes(function.__code__)
        for word in (*code.co_consts, *code.co_names)
        if isinstance(word, str)
    }


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
