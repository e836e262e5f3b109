"""Replaces attributes of others, and puts back what was there."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

Place = tuple[Any, str]

_registry: list["Replacements"] = []


def swap(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Gives one object another attribute until a stack unwinds."""
    # Not by `setattr`: Keras and TensorFlow would begin to track the value.
    own = vars(owner)
    if name in own:
        undo.callback(own.__setitem__, name, own[name])
    else:
        undo.callback(own.pop, name)
    own[name] = value


def replaced() -> list[Place]:
    """Returns every place that is replaced for the whole process just now."""
    return list(
        dict.fromkeys(
            p for replacements in _registry for p in replacements.places()
        )
    )


class Replacements:
    """Attributes of modules and classes, replaced for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # (owner, attribute) -> (what was there, what stands there now).
        self._replaced: dict[Place, tuple[Any, Any]] = {}
        _registry.append(self)

    def places(self) -> list[Place]:
        """Returns the `(owner, attribute)` pairs replaced just now."""
        return list(self._replaced)

    def set(self, wanted: Mapping[Place, Callable[[Any], Any]]) -> None:
        """Replaces the places of `wanted`, by old value, and no others."""
        with self._lock:
            for place in [p for p in self._replaced if p not in wanted]:
                owner, name = place
                original, ours = self._replaced.pop(place)
                # Whoever replaced the attribute after us keeps their version;
                # ours inside it then finds nothing in force and passes on.
                if vars(owner).get(name) is ours:
                    setattr(owner, name, original)
            for (owner, name), make in wanted.items():
                if (owner, name) not in self._replaced:
                    original = vars(owner)[name]
                    setattr(owner, name, make(original))
                    ours = vars(owner)[name]
                    self._replaced[owner, name] = (original, ours)
