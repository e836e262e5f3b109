"""Finds users' gradient functions, and what they belong to."""

from collections.abc import Callable
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import layers, replacing

PLACES: tuple[replacing.Place, ...] = ()
if keras.backend.backend() == "jax":
    import jax

    PLACES = ((jax.custom_vjp, "__call__"),)
# Scaling changes nothing in the gradients of these packages' functions, which
# are linear in what comes in.
_LINEAR = {"tensorflow", "jax", "keras", "tfmix"}


def is_linear(function: Callable) -> bool:
    """Returns whether a function's gradient grows with what comes in."""
    return (function.__module__ or "").partition(".")[0] in _LINEAR


def say_scaled(function: Callable) -> None:
    """Says that a function's gradient function gets scaled gradients."""
    layer, name = layers.running_path(), function.__qualname__
    _messages.warn_once(
        f"the gradient of {name} in layer {layer!r} gets gradients that are "
        "multiplied by a power of two, because it is called inside a compiled "
        "function or a loop. A gradient that clips or takes a sign is then "
        "wrong; call it outside of that, or give the layer dtype='float32' in "
        "a model of its own",
        about=("scaled gradient", name),
    )


def with_rule(function: Any) -> Callable | None:
    """Returns what `jax.custom_gradient` got, `None` for other functions.

    It takes arguments, and returns a result and its gradient function. JAX
    traces that one for gradients of the result's dtypes.
    """
    inner = function.fun
    if getattr(inner, "__module__", "") != jax.custom_gradient.__module__:
        return None
    names = inner.__code__.co_freevars
    cells = dict(zip(names, inner.__closure__ or (), strict=True))
    return cells["fun"].cell_contents if "fun" in cells else None
