"""Replaces attributes for the process, or for a block.

Whatever replaces an attribute can list it and put it back. What the core of
tfmix replaces for the process is one list (`autocast.replaced`) in three
groups, and `want` replaces or restores a group.

Keras looks up its ops in a few modules. While a rule is active for any caller,
these modules are replaced by copies. Their functions, and the operators of
tensors, look up the caller's rules.
"""

import contextlib
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tfmix._keras import context, version

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


# The number of running blocks, over all threads.
_running = 0
# The rules whose names are replaced now.
_replaced: frozenset[str] = frozenset()


def install(wanted: Iterable[str]) -> None:
    """Activates exactly these rules for the process.

    Functions traced earlier (`tf.function`, `jax.jit`, a model's compiled
    `train_step`) keep the rules they were traced under.
    """
    rules = frozenset(wanted)
    with _lock:
        context.installed.rules = rules
        # Running blocks keep what they need.
        _replace(rules | _replaced if _running else rules)


@contextlib.contextmanager
def block(rules: Iterable[str], **more: Any) -> Iterator[None]:
    """Runs a block under exactly these rules, whatever is installed.

    Other threads, and the code after the block, keep their rules. Names stay
    replaced until `install` is called after the block: a model with a policy
    runs each call in one, and would otherwise restore them each time.

    Args:
        rules: The rules.
        **more: Further settings of a `context.Block`.
    """
    global _running
    wanted = frozenset(rules)
    with _lock:
        _running += 1
        _replace(_replaced | wanted)
    try:
        with context.holding(rules=wanted, **more):
            yield
    finally:
        with _lock:
            _running -= 1


def _replace(needed: frozenset[str]) -> None:
    """Replaces exactly what rules need."""
    global _replaced
    if needed != _replaced:
        want(OPS, needed)
        _replaced = needed


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
            if rule in context.active_rules():
                return ruled(*args, **kwargs)
            return original(*args, **kwargs)

        return replacement

    return made
