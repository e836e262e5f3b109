"""Replaces attributes of others, and puts back what was there."""

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

Place = tuple[Any, str]

_registry: list["Replacements"] = []


def swap(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Gives one object another attribute until a stack unwinds.

    Not through `setattr`: Keras and TensorFlow would begin to track the value.
    """
    own = vars(owner)
    if name in own:
        undo.callback(own.__setitem__, name, own[name])
    else:
        undo.callback(own.pop, name)
    own[name] = value


def replaced() -> list[Place]:
    """Returns every place that is replaced for the whole process just now."""
    places = [place for each in _registry for place in each.places()]
    return list(dict.fromkeys(places))


class Replacements:
    """Attributes of modules and classes, replaced for the whole process.

    The raw entry of `vars(owner)` is kept, so that a `staticmethod` comes
    back as the very object it was.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # (owner, attribute) -> (what was there, what stands there now).
        self._replaced: dict[Place, tuple[Any, Any]] = {}
        _registry.append(self)

    def places(self) -> list[Place]:
        """Returns the `(owner, attribute)` pairs replaced just now."""
        return list(self._replaced)

    def set(self, wanted: Mapping[Place, Callable[[Any], Any]]) -> None:
        """Makes the replaced places exactly those of `wanted`.

        Args:
            wanted: For each place a function that takes what is there and
                returns what is to stand there. A place that is replaced
                already is left as it is.
        """
        with self._lock:
            for place in [p for p in self._replaced if p not in wanted]:
                self._restore(place)
            for place, make in wanted.items():
                if place not in self._replaced:
                    owner, attribute = place
                    original = vars(owner)[attribute]
                    setattr(owner, attribute, make(original))
                    current = vars(owner)[attribute]
                    self._replaced[place] = (original, current)

    def _restore(self, place: Place) -> None:
        owner, attribute = place
        original, ours = self._replaced.pop(place)
        # Whoever replaced the attribute after us keeps their version; ours
        # inside it then finds nothing in force and passes every call on.
        if vars(owner).get(attribute) is ours:
            setattr(owner, attribute, original)
