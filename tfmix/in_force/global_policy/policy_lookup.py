"""How Keras's layers look up tfmix's policy, while one is in force."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import compile_method, global_state, replacements
from tfmix.in_force.global_policy import new_layers
from tfmix.in_force.model import mixed_model
from tfmix.policy import policy as policies

Lookup = Callable[[], keras.DTypePolicy | None]
Replaced = Callable[[keras.DTypePolicy], None]

_replacements = replacements.Replacements()
compile_method.use(mixed_model.compiling)


def are_installed() -> bool:
    """Says whether Keras asks tfmix for its policy just now."""
    return bool(_replacements.places())


def install(lookup: Lookup, replaced: Replaced) -> None:
    """Lets Keras ask tfmix; does nothing when it does already."""
    if are_installed():
        return
    wanted: dict[replacements.Place, Callable[[Any], Any]] = {
        global_state.GETTER: lambda f: _getter(f, lookup),
        global_state.SETTER: lambda f: _setter(f, replaced),
        (keras.Layer, "__init__"): lambda f: _initializer(f, lookup),
    }
    for owner, name in (*wanted, compile_method.PLACE):
        if name not in vars(owner):
            raise RuntimeError(
                f"tfmix does not fit Keras {keras.__version__}: {owner!r} has "
                f"no {name!r}. Install a Keras it was tested on (3.12 to "
                "3.15), or a newer tfmix."
            )
    _replacements.set(wanted)
    compile_method.stand_by(lasts=False)


def remove() -> None:
    """Gives Keras its own functions back, but for `compile`."""
    _replacements.set({})


def _getter(original: Callable, lookup: Lookup) -> Callable:
    @functools.wraps(original)
    def get_global_attribute(name: str, *args: Any, **kwargs: Any) -> Any:
        # This is called some ten times per layer call, with other names.
        if name == global_state.POLICY_KEY:
            policy = lookup()
            if policy is not None:
                return policies.plain(policy)
        return original(name, *args, **kwargs)

    return get_global_attribute


def _setter(original: Callable, replaced: Replaced) -> Callable:
    @functools.wraps(original)
    def set_global_attribute(name: str, value: Any) -> None:
        original(name, value)
        if name == global_state.POLICY_KEY and value is not None:
            replaced(value)

    return set_global_attribute


def _initializer(original: Callable, lookup: Lookup) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        policy = lookup()
        if policy is not None:
            new_layers.settle(self, kwargs.get("dtype"), policy)

    # Keras makes configurations out of constructors' arguments, by two
    # readers of signatures, of which one does not look through wrappers.
    vars(__init__)["__signature__"] = inspect.signature(original)
    return __init__
