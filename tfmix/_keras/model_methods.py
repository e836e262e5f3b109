"""The methods of one model that tfmix changes: one owner, each wrapped once.

Every wrapper is an attribute of the one model, so no class of Keras keeps a
trace, and all that one role of tfmix put on comes off together.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras

from tfmix._keras import layers

# Called with the method inside it, then the arguments of the call.
Wrapper = Callable[..., Any]
# From the inside out: code that falls back to float32 is traced anew under the
# policy's rules, and a guard restores what ran under them.
FALLBACK, RULES, GUARD = "fallback", "rules", "guard"


class Part(Protocol):
    """What plays a role for one model."""

    @property
    def wrappers(self) -> Mapping[str, Wrapper]:
        """What is put around each method, by its name."""


def part(model: keras.Model, role: str) -> Part | None:
    """Returns what has a role for a model, `None` if nothing has."""
    return by_role(model).get(role)


def by_role(model: keras.Model) -> dict[str, Part]:
    """Returns what is in force, by role, as a copy that `restore` takes."""
    owner: _Owner | None = layers.marks(model).methods
    return {} if owner is None else dict(owner.parts)


def put(model: keras.Model, role: str, part: Part) -> None:
    """Puts a part's wrappers on a model, in place of what had the role."""
    restore(model, {**by_role(model), role: part})


def take_off(model: keras.Model, role: str) -> None:
    """Removes what has a role; one that nothing has is no error."""
    restore(model, {r: part for r, part in by_role(model).items() if r != role})


def restore(model: keras.Model, parts: Mapping[str, Part]) -> None:
    """Makes what is in force exactly these parts."""
    owner = layers.marks(model).methods or _Owner(model)
    owner.set(parts)
    layers.mark(model, methods=owner if parts else None)


class _Owner:
    """Owns what stands around the methods of one model."""

    def __init__(self, model: keras.Model) -> None:
        self.parts: Mapping[str, Part] = {}
        self._model = model
        # What stands on the model now, and what the user had put there.
        self._installed: dict[str, Callable] = {}
        self._users: dict[str, Callable] = {}

    def set(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        wanted = {name for part in parts.values() for name in part.wrappers}
        for name in set(self._installed) - wanted:
            self._remove(name)
        for name in wanted:
            self._install(name)

    def _install(self, name: str) -> None:
        own = vars(self._model).get(name)
        if own is not None and own is self._installed.get(name):
            return
        self._users.pop(name, None)
        if own is not None:
            # The user set it, before or after us: it is what we wrap.
            self._users[name] = own
        self._installed[name] = method = self._composed(name)
        object.__setattr__(self._model, name, method)

    def _remove(self, name: str) -> None:
        method, users = self._installed.pop(name), self._users.pop(name, None)
        if vars(self._model).get(name) is not method:
            # Somebody has put another on top, which is theirs to remove.
            return
        if users is None:
            object.__delattr__(self._model, name)
        else:
            object.__setattr__(self._model, name, users)

    def _composed(self, name: str) -> Callable:
        @functools.wraps(getattr(self._model, name))
        def method(*args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: parts and hooks come and go.
            call = self._users.get(name) or functools.partial(
                getattr(type(self._model), name), self._model
            )
            for role in (FALLBACK, RULES, GUARD):
                part = self.parts.get(role)
                if part is not None and name in part.wrappers:
                    call = functools.partial(part.wrappers[name], call)
            return call(*args, **kwargs)

        return method
