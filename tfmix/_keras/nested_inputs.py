"""Nested models take their inputs uncast.

A Functional or Sequential model made of 16-bit tensors notes their dtype and
casts whatever comes in to it, also once its own layers, and the one before it,
compute in float32.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1.
"""

from collections.abc import Callable
from typing import Any

from tfmix import _formats

_WIDE = _formats.FLOAT32.name


def widen_inputs(layer: Any) -> Callable[[], None]:
    """Lets a nested model pass its 16-bit inputs on in float32.

    Each layer inside casts what it takes to its own dtype anyway.

    Args:
        layer: Any layer; all but Functional and Sequential are left alone.

    Returns:
        A function that puts the dtypes back.
    """
    graph = getattr(layer, "_functional", None) or layer
    noted = []
    for tensor in getattr(graph, "_inputs", None) or ():
        # The tensor decides at run time, its layer in a saved model.
        history = getattr(tensor, "_keras_history", None)
        for holder in (tensor, getattr(history, "operation", None)):
            dtype = vars(holder).get("_dtype") if holder is not None else None
            if dtype in _formats.SIXTEEN_BIT:
                object.__setattr__(holder, "_dtype", _WIDE)
                noted.append((holder, dtype))

    def restore() -> None:
        for holder, dtype in noted:
            object.__setattr__(holder, "_dtype", dtype)

    return restore
