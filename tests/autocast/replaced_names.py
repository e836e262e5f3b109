"""Finds what differs in the modules and classes of Keras and its backend."""

import inspect
import sys

# All that tfmix may replace is in these packages.
PACKAGES = ("keras", "tensorflow", "jax", "jaxlib")
# Python sets these by itself, and Keras with each class.
VOLATILE = {"_abc_impl", "__annotations__", "__warningregistry__"}
MISSING = object()


def owners(*more):
    """Returns every module of the packages, every class in them, and more."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in PACKAGES and inspect.ismodule(module)
    ]
    classes = {
        id(value): value
        for module in modules
        for value in list(vars(module).values())
        if inspect.isclass(value)
        and (value.__module__ or "").partition(".")[0] in PACKAGES
    }
    return [*modules, *classes.values(), *more]


def label(owner, attribute):
    """Returns `owner.attribute`, with the module of a class."""
    parent = f"{owner.__module__}." if inspect.isclass(owner) else ""
    return f"{parent}{owner.__name__}.{attribute}"


def snapshot(everything):
    """Returns the attributes of modules and classes, by owner and name."""
    return {
        (owner, name): value
        for owner in everything
        for name, value in list(vars(owner).items())
        if name not in VOLATILE
    }


def changed(before, everything):
    """Returns the places whose function, class or module is another object."""
    now = snapshot(everything)
    return [
        place
        for place in before.keys() | now.keys()
        if _differs(before.get(place, MISSING), now.get(place, MISSING))
    ]


def _differs(one, other):
    # An import adds modules to a package.
    is_import = one is MISSING and inspect.ismodule(other)
    is_code = _is_code(one) or _is_code(other)
    return one is not other and is_code and not is_import


def _is_code(value):
    return (
        callable(value)
        or inspect.ismodule(value)
        or hasattr(type(value), "__get__")
    )
