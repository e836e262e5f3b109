"""The methods of one model that tfmix changes, each wrapped once.

Wrappers are attributes of the model: no class of Keras keeps a trace, and all
that one role of tfmix put on comes off together.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras

# Called with the method inside it, then the arguments of the call.
Wrapper = Callable
# From the inside out: a guard restores what ran under the policy's rules.
RULES, GUARD = "rules", "guard"
_ROLES = (RULES, GUARD)
_OWNER = "_tfmix_methods"


class Part(Protocol):
    """What plays a role for one model: the wrappers of its methods, by name."""

    @property
    def wrappers(self) -> Mapping[str, Wrapper]:
        """What is put around each method."""


class ModelMethods:
    """What stands around the methods of one model, by role; see `of`."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._parts: dict[str, Part] = {}
        # What stands on the model now, and what the user had put there.
        self._installed: dict[str, Callable] = {}
        self._users: dict[str, Callable] = {}

    @property
    def parts(self) -> dict[str, Part]:
        """What is in force, by role, as a copy that `restore` takes."""
        return dict(self._parts)

    def put(self, role: str, part: Part) -> None:
        """Puts a part's wrappers on, in place of what had the role."""
        self.restore({**self._parts, role: part})

    def take_off(self, role: str) -> None:
        """Removes what has a role; one that nothing has is no error."""
        self.restore({k: v for k, v in self._parts.items() if k != role})

    def restore(self, parts: Mapping[str, Part]) -> None:
        """Makes what is in force exactly these parts."""
        self._parts = dict(parts)
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
        method = self._installed.pop(name)
        users = self._users.pop(name, None)
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
            for role in _ROLES:
                part = self._parts.get(role)
                if part is not None and name in part.wrappers:
                    call = functools.partial(part.wrappers[name], call)
            return call(*args, **kwargs)

        return method


def of(model: keras.Model) -> ModelMethods:
    """Returns the owner of a model's methods, made at the first request."""
    owner: ModelMethods | None = vars(model).get(_OWNER)
    if owner is None:
        owner = ModelMethods(model)
        # Past Keras's tracking, which is for a layer's state.
        object.__setattr__(model, _OWNER, owner)
    return owner


def part(model: keras.Model, role: str) -> Part | None:
    """Returns what has a role for a model, `None` if nothing has."""
    owner: ModelMethods | None = vars(model).get(_OWNER)
    return None if owner is None else owner.parts.get(role)
