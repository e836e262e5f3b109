"""Replaces attributes of other objects, and restores them."""

import contextlib
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

Place = tuple[Any, str]

_registry: list["Replacements"] = []


def swap(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute of one object until a stack unwinds."""
    # With `setattr`, Keras and TensorFlow would begin to track the value.
    own = vars(owner)
    if name in own:
        undo.callback(own.__setitem__, name, own[name])
    else:
        undo.callback(own.pop, name)
    own[name] = value


def copy_module(
    module: types.ModuleType, functions: Mapping[str, Callable]
) -> types.ModuleType:
    """Copies a module, with other functions in place of some."""
    copy = types.ModuleType(module.__name__, module.__doc__)
    vars(copy).update({**vars(module), **functions})
    return copy


def definers(kind: type, name: str) -> list[Place]:
    """Returns the places of a method in a class and those it derives from.

    Others may have put a function into a derived class, which calls the one
    that it found before us.
    """
    return [(each, name) for each in kind.__mro__ if name in vars(each)]


def replaced() -> list[Place]:
    """Returns every place that is replaced for the whole process now."""
    return list(
        dict.fromkeys(
            p for replacements in _registry for p in replacements.places()
        )
    )


class Replacements:
    """Attributes of modules and classes, replaced for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # The original and the replacement of each place.
        self._replaced: dict[Place, tuple[Any, Any]] = {}
        _registry.append(self)

    def places(self) -> list[Place]:
        """Returns the `(owner, attribute)` pairs that are replaced now."""
        return list(self._replaced)

    def set(self, wanted: Mapping[Place, Callable[[Any], Any]]) -> None:
        """Replaces the places of `wanted`, and restores all others."""
        with self._lock:
            for place in [p for p in self._replaced if p not in wanted]:
                owner, name = place
                original, ours = self._replaced.pop(place)
                # Code that replaced the attribute after us keeps its version.
                # Our function inside it then finds no active rule and calls the
                # original.
                if vars(owner).get(name) is ours:
                    setattr(owner, name, original)
            for (owner, name), make in wanted.items():
                if (owner, name) not in self._replaced:
                    original = vars(owner)[name]
                    setattr(owner, name, make(original))
                    ours = vars(owner)[name]
                    self._replaced[owner, name] = (original, ours)
