"""Reads and sets one layer's dtype policy without Keras's side effects."""

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import name_scope

from tfmix import _formats
from tfmix._keras import version

# `Layer.__call__` calls this method first, before it casts inputs. An instance
# attribute of that name hooks one layer and leaves its class alone.
FIRST_CALLED = "_check_super_called"


def put(layer: Any, name: str, value: Any) -> None:
    """Sets an attribute without Keras tracking it as state."""
    object.__setattr__(layer, name, value)


def set_policy(layer: keras.Layer, policy: keras.DTypePolicy) -> None:
    """Sets a layer's policy; Keras's setter would write into a user's map."""
    put(layer, "_dtype_policy", policy)


def own(layer: keras.Layer) -> keras.DTypePolicy:
    """Returns a layer's own policy; Keras's getter may copy a map."""
    policy: keras.DTypePolicy = vars(layer)["_dtype_policy"]
    return policy


def change_policy(layer: keras.Layer, **methods: Callable) -> None:
    """Gives a layer a plain policy of its own with other methods."""
    policy = layer.dtype_policy
    if type(policy) is keras.DTypePolicy:
        own = keras.DTypePolicy(policy.name)
        # Other methods that were replaced before stay.
        vars(own).update(vars(policy), **methods)
        set_policy(layer, own)


def path_of(layer: keras.Layer) -> str:
    """Returns a layer's path, even before its first call sets it."""
    if layer.path:
        return str(layer.path)
    parent = layer._parent_path
    if parent is None:
        parent = name_scope.current_path()
    return f"{parent}/{layer.name}" if parent else str(layer.name)


def running() -> str:
    """Returns the path of the layer whose call is running."""
    return str(name_scope.current_path())


def set_path(layer: keras.Layer, path: str) -> None:
    """Sets the path of a layer."""
    put(layer, "_path", path)


def until_built(layer: keras.Layer, action: Callable) -> None:
    """Runs an action before each use of a layer until it is built."""
    if not hasattr(layer, FIRST_CALLED):
        raise version.misfit(f"layers have no {FIRST_CALLED!r}")
    original = getattr(type(layer), FIRST_CALLED)
    busy: list[bool] = []

    def check() -> None:
        original(layer)
        if busy:
            return
        busy.append(True)
        try:
            action(layer)
        finally:
            busy.pop()
        if layer.built and layer._called:
            vars(layer).pop(FIRST_CALLED, None)

    put(layer, FIRST_CALLED, check)


def widen_inputs(layer: Any) -> Callable[[], None]:
    """Makes a nested model pass its inputs on in float32; returns an undo."""
    # A Functional or Sequential model casts to the dtype of its symbolic
    # inputs. Each layer inside casts its own inputs anyway.
    graph = getattr(layer, "_functional", None) or layer
    noted = []
    for tensor in getattr(graph, "_inputs", None) or ():
        # Calls read the dtype of the tensor; saved files read that of its
        # layer.
        history = getattr(tensor, "_keras_history", None)
        for holder in (tensor, getattr(history, "operation", None)):
            dtype = vars(holder).get("_dtype") if holder is not None else None
            if dtype in _formats.SIXTEEN_BIT:
                put(holder, "_dtype", _formats.FLOAT32.name)
                noted.append((holder, dtype))

    def restore() -> None:
        for holder, dtype in noted:
            put(holder, "_dtype", dtype)

    return restore
