"""Finds the user's function behind a `jax.custom_vjp`."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import replacing

PLACES: tuple[replacing.Place, ...] = ()
if keras.backend.backend() == "jax":
    import jax
    import jax.extend

    PLACES = ((jax.custom_vjp, "__call__"),)
    # JAX before 0.8 has none.
    _CONTEXT = getattr(jax, "make_user_context", lambda: None)()


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


def transformation() -> Any:
    """Returns a token of the running trace or transformation, such as `vmap`.

    It is a string in versions of JAX that do not tell.
    """
    state = getattr(jax.extend.core, "get_opaque_trace_state", None)
    return state() if state else "unknown"


def traced_apart(value: Any) -> contextlib.AbstractContextManager:
    """Keeps what JAX traces and compiles in a block for this value only.

    Functions in the block may use the value without taking it as an argument.

    Args:
        value: Scalar array.
    """
    if _CONTEXT is None:
        return contextlib.nullcontext()
    is_traced = isinstance(value, jax.core.Tracer)
    return _CONTEXT(object() if is_traced else float(value))
