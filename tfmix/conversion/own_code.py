"""The user's own classes and functions, while a model is saved and loaded.

Keras writes names into a file, and of a lambda its code without the globals
it uses: neither is enough to find the user's code again, which is at hand
when a model is copied within a process.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1.
"""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

_LAMBDA = "tfmix lambda "
# Two threads that put Keras's functions back out of turn would mix them up.
_lock = threading.RLock()


@contextlib.contextmanager
def kept_at_hand() -> Iterator[dict[str, Any]]:
    """Notes what this thread saves, so that it can be found by its name.

    Yields:
        Classes and functions by the names they are saved under. A lambda
        that is saved inside the block is itself when it is loaded there.
    """
    found: dict[str, Any] = {}
    lambdas: list[Any] = []

    def note_name(function: Callable, thing: Any) -> str:
        name: str = function(thing)
        found[name] = thing
        return name

    def dump(_: Callable, thing: Any) -> tuple[str, None, None]:
        lambdas.append(thing)
        return f"{_LAMBDA}{len(lambdas) - 1}", None, None

    def load(function: Callable, code: Any, *more: Any, **named: Any) -> Any:
        text = code[0] if isinstance(code, tuple | list) else code
        if str(text).startswith(_LAMBDA):
            return lambdas[int(text.removeprefix(_LAMBDA))]
        return function(code, *more, **named)

    with (
        _lock,
        _wrapped(
            "saving.object_registration", "get_registered_name", note_name
        ),
        _wrapped("utils.python_utils", "func_dump", dump),
        _wrapped("utils.python_utils", "func_load", load),
    ):
        yield found


@contextlib.contextmanager
def _wrapped(
    module_name: str, name: str, around: Callable[..., Any]
) -> Iterator[None]:
    """Puts a function around one of Keras's, for this thread alone."""
    module = importlib.import_module(f"keras.src.{module_name}")
    function = getattr(module, name)
    thread = threading.get_ident()

    def wrapper(*arguments: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return function(*arguments, **named)
        return around(function, *arguments, **named)

    setattr(module, name, wrapper)
    try:
        yield
    finally:
        setattr(module, name, function)
