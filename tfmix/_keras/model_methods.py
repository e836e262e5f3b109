"""Wraps methods of one model, each once.

Every wrapper is an attribute of that model, so Keras's classes stay unchanged,
and all wrappers of one role are attached and detached together.
"""

import functools
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras

from tfmix._keras import layers

# A wrapper gets the wrapped method, then the arguments of the call.
Wrapper = Callable[..., Any]
# The first is the innermost. A layer that falls back to float32 is traced again
# under the policy's rules, and the guard restores what ran under them.
FALLBACK, RULES, GUARD = _ROLES = "fallback", "rules", "guard"
# JAX compiles a function object once. A method of a class is a new object each
# time it is read. Our wrapper is not, so each of these gets a new one: else a
# model that is compiled again would go on with its first loss and metrics.
_COMPILED = {
    "make_train_function": "train_step",
    "make_test_function": "test_step",
}


class Part(Protocol):
    """Wrappers that have one role for a model."""

    @property
    def wrappers(self) -> Mapping[str, Wrapper]:
        """The wrapper of each method, by the method's name."""


def part(model: keras.Model, role: str) -> Part | None:
    """Returns the part that has a role for a model, or `None`."""
    return by_role(model).get(role)


def by_role(model: keras.Model) -> dict[str, Part]:
    """Returns a copy of the attached parts by role, for `restore`."""
    owner: _Owner | None = layers.marks(model).methods
    return {} if owner is None else dict(owner.parts)


def wrapped(model: keras.Model, name: str, role: str) -> Callable:
    """Returns the method that the wrapper of a role wraps now."""
    owner: _Owner = layers.marks(model).methods
    return owner.below(name, role)


def attach(model: keras.Model, role: str, part: Part) -> None:
    """Attaches a part to a model, in place of the one that had the role."""
    restore(model, {**by_role(model), role: part})


def detach(model: keras.Model, role: str) -> None:
    """Detaches the part that has a role, if there is one."""
    restore(model, {r: part for r, part in by_role(model).items() if r != role})


def restore(model: keras.Model, parts: Mapping[str, Part]) -> None:
    """Attaches exactly these parts."""
    owner = layers.marks(model).methods or _Owner(model)
    owner.set(parts)
    layers.mark(model, methods=owner if parts else None)


class _Owner:
    """Owns the wrapped methods of one model."""

    def __init__(self, model: keras.Model) -> None:
        self.parts: Mapping[str, Part] = {}
        self._model = model
        # The attributes on the model now, and those that the user had set.
        self._installed: dict[str, Callable] = {}
        self._users: dict[str, Callable] = {}

    def set(self, parts: Mapping[str, Part]) -> None:
        self.parts = dict(parts)
        wanted = {name for part in parts.values() for name in part.wrappers}
        wanted |= {make for make, step in _COMPILED.items() if step in wanted}
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
            # The user set it, before or after us, so we wrap it.
            self._users[name] = own
        self._attach(name)

    def _attach(self, name: str) -> None:
        self._installed[name] = method = self._composed(name)
        object.__setattr__(self._model, name, method)

    def _renew(self, name: str) -> None:
        """Attaches a new object in place of a wrapped method."""
        if vars(self._model).get(name) is self._installed.get(name):
            self._attach(name)

    def _remove(self, name: str) -> None:
        method, users = self._installed.pop(name), self._users.pop(name, None)
        if vars(self._model).get(name) is not method:
            # Other code has wrapped it since, and has to remove that itself.
            return
        if users is None:
            object.__delattr__(self._model, name)
        else:
            object.__setattr__(self._model, name, users)

    def _composed(self, name: str) -> Callable:
        @functools.wraps(self._original(name))
        def method(*args: Any, **kwargs: Any) -> Any:
            if name in _COMPILED:
                self._renew(_COMPILED[name])
            return self.below(name)(*args, **kwargs)

        return method

    def below(self, name: str, role: str = "") -> Callable:
        """Returns a method in the wrappers that are inside of a role's.

        It is looked up in each call, because parts and hooks change.
        """
        call = self._original(name)
        for inner in itertools.takewhile(lambda r: r != role, _ROLES):
            part = self.parts.get(inner)
            if part is not None and name in part.wrappers:
                call = functools.partial(part.wrappers[name], call)
        return call

    def _original(self, name: str) -> Callable:
        """Returns the user's own method, or that of the model's class."""
        of_class = getattr(type(self._model), name)
        return self._users.get(name) or types.MethodType(of_class, self._model)
