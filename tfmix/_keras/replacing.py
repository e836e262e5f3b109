"""Replaces attributes for the process, for a block, or on one layer.

Whatever replaces an attribute can list it and put it back. What the core of
tfmix replaces for the process is one list (`autocast.replaced`) in three
groups, and `want` replaces or restores a group. The wrappers of a layer's
methods are attributes of that layer, so Keras's classes stay unchanged, and all
wrappers of one role are attached and detached together.
"""

import contextlib
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras

from tfmix._keras import context_values, layers, version

Place = tuple[Any, str]
# Takes what a place holds, and returns what replaces it.
Maker = Callable[[Any], Any]

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

    Others may have put a function into a class of Keras's that derives from it,
    which calls the one that it found before us.
    """
    owners = [*filter(functools.partial(_is_hooked, name), _derived(kind))]
    owners += [each for each in kind.__mro__ if name in vars(each)]
    return [(each, name) for each in owners]


def _derived(kind: type) -> Iterator[type]:
    """Yields Keras's classes that derive from a class."""
    subclasses: list[type] = kind.__subclasses__()
    for each in subclasses:
        if each.__module__.partition(".")[0] == "keras":
            yield each
            yield from _derived(each)


def _is_hooked(name: str, kind: type) -> bool:
    """Returns whether a class has a method that is not its own."""
    method = vars(kind).get(name)
    is_own = getattr(method, "__module__", None) == kind.__module__
    return method is not None and not is_own


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

    def set(self, wanted: Mapping[Place, Maker]) -> None:
        """Replaces the places of `wanted`, and restores all others."""
        with self._lock:
            # Others may have taken away again what we replaced of theirs.
            for owner, name in wanted.keys() - self._replaced.keys():
                if name not in vars(owner):
                    raise version.misfit(f"{owner!r} has no {name!r}")
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


# The groups of the list: Keras's `compile`, what a new layer gets, and ops.
COMPILE, LAYERS, OPS = "compile", "layers", "ops"
_lock = threading.RLock()
_of_list = Replacements()
# What each group replaces now.
_active: dict[str, Mapping[Place, Maker]] = {}
_find: Callable[[str, Any], Mapping[Place, Maker]]


def use(find: Callable[[str, Any], Mapping[Place, Maker]]) -> None:
    """Sets the list: what a group replaces, for some value of `want`."""
    global _find
    _find = find


def want(group: str, what: Any) -> None:
    """Replaces a group of names, or restores them if `what` is false.

    Args:
        group: One of `COMPILE`, `LAYERS` and `OPS`.
        what: Whether to replace them; for ops the rules that are active.
    """
    with _lock:
        active = {**_active, group: _find(group, what) if what else {}}
        _of_list.set(functools.reduce(operator.or_, active.values()))
        _active.update(active)


def is_wanted(group: str) -> bool:
    """Returns whether a group of names is replaced now."""
    return bool(_active.get(group))


def lazily(make: Maker) -> Maker:
    """Returns a maker whose replacement calls `make` when it is first called.

    Many of them never are.
    """

    def made_lazily(original: Callable) -> Callable:
        made = functools.cache(functools.partial(make, original))

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return made()(*args, **kwargs)

        return replacement

    return made_lazily


def under(rule: str, make: Maker) -> Maker:
    """Returns a maker whose replacement holds for callers under a rule."""

    def made(original: Callable) -> Callable:
        ruled = lazily(make)(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if rule in context_values.active_rules():
                return ruled(*args, **kwargs)
            return original(*args, **kwargs)

        return replacement

    return made


# A wrapper gets the wrapped method, then the arguments of the call.
Wrapper = Callable[..., Any]
# The first is the innermost. A layer that falls back to float32 is traced again
# under the policy's rules, and the guard restores what ran under them.
CALL, RULES, GUARD = _ROLES = "call", "rules", "guard"
# JAX compiles a function object once. A method of a class is a new object each
# time it is read. Our wrapper is not, so each of these gets a new one: else a
# model that is compiled again would go on with its first loss and metrics.
_COMPILED = {
    "make_train_function": "train_step",
    "make_test_function": "test_step",
}


def argument(
    order: Sequence[str],
    args: Sequence,
    kwargs: Mapping,
    name: str,
    default: Any = None,
) -> Any:
    """Returns an argument of a call, or its default.

    Args:
        order: The names of the arguments in the function of Keras's own. What
            others have put in its place may be a `(*args, **kwargs)`, or name
            only a few.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
        name: The argument's name.
        default: The value if the call lacks the argument.
    """
    given = dict(zip(order, args, strict=False))
    return {**kwargs, **given}.get(name, default)


def with_argument(
    order: Sequence[str], args: Sequence, kwargs: Mapping, name: str, value: Any
) -> tuple[tuple, dict]:
    """Returns a call's arguments with one of them changed or added.

    What came by position stays there, and what came by name keeps its name.
    """
    place = order.index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
    return tuple(args), {**kwargs, name: value}


class Wrappers(Protocol):
    """Wrappers that have one role for a layer."""

    @property
    def wrappers(self) -> Mapping[str, Wrapper]:
        """The wrapper of each method, by the method's name."""


def part(layer: keras.Layer, role: str) -> Any:
    """Returns the part that has a role for a layer, or `None`."""
    return by_role(layer).get(role)


def by_role(layer: keras.Layer) -> Mapping[str, Wrappers]:
    """Returns the attached parts by role, for `restore`."""
    owner: _Owner | None = layers.marks(layer).methods
    return {} if owner is None else owner.parts


def wrapped(layer: keras.Layer, name: str, role: str) -> Callable:
    """Returns the method that the wrapper of a role wraps now."""
    owner: _Owner = layers.marks(layer).methods
    return owner.below(name, role)


def attach(layer: keras.Layer, role: str, part: Wrappers) -> None:
    """Attaches a part to a layer, in place of the one that had the role."""
    restore(layer, {**by_role(layer), role: part})


def detach(layer: keras.Layer, role: str) -> None:
    """Detaches the part that has a role, if there is one."""
    restore(layer, {r: part for r, part in by_role(layer).items() if r != role})


def restore(layer: keras.Layer, parts: Mapping[str, Wrappers]) -> None:
    """Attaches exactly these parts."""
    owner = layers.marks(layer).methods or _Owner(layer)
    owner.set(parts)
    layers.mark(layer, methods=owner if parts else None)


class _Owner:
    """Owns the wrapped methods of one layer."""

    def __init__(self, layer: keras.Layer) -> None:
        self.parts: Mapping[str, Wrappers] = {}
        self._layer = layer
        # The attributes on the layer now, and those that the user had set.
        self._installed: dict[str, Callable] = {}
        self._users: dict[str, Callable] = {}

    def set(self, parts: Mapping[str, Wrappers]) -> None:
        self.parts = {role: parts[role] for role in _ROLES if role in parts}
        wanted = {name for part in parts.values() for name in part.wrappers}
        wanted |= {make for make, step in _COMPILED.items() if step in wanted}
        for name in set(self._installed) - wanted:
            self._remove(name)
        for name in wanted:
            self._install(name)

    def _install(self, name: str) -> None:
        own = vars(self._layer).get(name)
        if own is not None and own is self._installed.get(name):
            return
        self._users.pop(name, None)
        if own is not None:
            # The user set it, before or after us, so we wrap it.
            self._users[name] = own
        self._attach(name)

    def _attach(self, name: str) -> None:
        self._installed[name] = method = self._composed(name)
        object.__setattr__(self._layer, name, method)

    def _renew(self, name: str) -> None:
        """Attaches a new object in place of a wrapped method."""
        if vars(self._layer).get(name) is self._installed.get(name):
            self._attach(name)

    def _remove(self, name: str) -> None:
        method, users = self._installed.pop(name), self._users.pop(name, None)
        if vars(self._layer).get(name) is not method:
            # Other code has wrapped it since, and has to remove that itself.
            return
        if users is None:
            object.__delattr__(self._layer, name)
        else:
            object.__setattr__(self._layer, name, users)

    def _composed(self, name: str) -> Callable:
        users, compiled = self._users.get(name), _COMPILED.get(name)

        @functools.wraps(self._original(name, users))
        def method(*args: Any, **kwargs: Any) -> Any:
            if compiled is not None:
                self._renew(compiled)
            if self._users.get(name) is not users:
                # The user has wrapped this method, and a newer one wraps that.
                return self._original(name, users)(*args, **kwargs)
            return self.below(name)(*args, **kwargs)

        return method

    def below(self, name: str, role: str = "") -> Callable:
        """Returns a method in the wrappers that are inside of a role's.

        It is looked up in each call, because parts and hooks change.
        """
        call = self._original(name, self._users.get(name))
        for inner, part in self.parts.items():
            if inner == role:
                break
            if name in part.wrappers:
                call = functools.partial(part.wrappers[name], call)
        return call

    def _original(self, name: str, users: Callable | None) -> Callable:
        """Returns the user's own method, or that of the layer's class."""
        of_class = getattr(type(self._layer), name)
        return users or types.MethodType(of_class, self._layer)
