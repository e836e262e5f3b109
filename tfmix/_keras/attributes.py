"""Puts attributes of modules and classes aside, and back by identity."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

Place = tuple[Any, str]


class Replacements:
    """What stands in for attributes of others just now.

    The raw entry of `vars(owner)` is kept, so that a `staticmethod` comes
    back as the very object it was.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # (owner, attribute) -> (what was there, what stands there now).
        self._replaced: dict[Place, tuple[Any, Any]] = {}

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
