"""Finds users' gradient functions, and what they belong to."""

import inspect
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


def say_scaled() -> None:
    """Says that a gradient function of the running layer is not unscaled."""
    layer = layers.running_path()
    _messages.warn_once(
        f"a gradient function in layer {layer!r} gets gradients that are "
        "multiplied by a power of two, because it is called inside a compiled "
        "function or a loop. A gradient that clips or takes a sign is then "
        "wrong; call it outside of that, or give the layer dtype='float32' in "
        "a model of its own",
        about=("scaled gradient", layer),
    )


def users_function(function: Any) -> Callable:
    """Returns the function that a user gave to JAX, from a `custom_vjp`.

    What `jax.custom_gradient` got is a part of the function that it makes.
    """
    inner: Callable = function.fun
    if inner.__module__ != jax.custom_gradient.__module__:
        return inner
    held = inspect.getclosurevars(inner).nonlocals
    return held.get("fun", inner)
