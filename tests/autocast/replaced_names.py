"""Finds what differs in Keras's modules and classes, without tfmix."""

import inspect
import sys
import types

# Keras itself sets these with each session or class, Python on first use.
VOLATILE = {
    *("_abc_impl", "GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER"),
    *("__annotations__", "__warningregistry__"),
}
PLAIN = (int, float, str, tuple, types.MappingProxyType)


def owners():
    """Returns every module of `keras`, and every class in them."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "keras" and inspect.ismodule(module)
    ]
    classes = {
        id(value): value
        for module in modules
        for value in list(vars(module).values())
        if inspect.isclass(value) and value.__module__.startswith("keras")
    }
    return [*modules, *classes.values()]


def label(owner, attribute):
    """Returns `owner.attribute`, with the module of a class."""
    parent = f"{owner.__module__}." if inspect.isclass(owner) else ""
    return f"{parent}{owner.__name__}.{attribute}"


def snapshot(everything):
    """Returns the attributes of modules and classes by their labels."""
    return {
        label(owner, name): value
        for owner in everything
        for name, value in list(vars(owner).items())
        if name not in VOLATILE
    }


def changed(before, after):
    """Returns the labels whose value is another object, new or gone."""
    missing = object()
    return sorted(
        place
        for place in before.keys() | after.keys()
        if not _is_same(before.get(place, missing), after.get(place, missing))
    )


def _is_same(one, other):
    return one is other or (isinstance(one, PLAIN) and one == other)
