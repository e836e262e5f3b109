"""Puts something else in an attribute's place until a stack unwinds."""

import contextlib
from typing import Any


def swap(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Gives an object an attribute for a while.

    Not through `setattr`: Keras and TensorFlow would begin to track the value.

    Args:
        undo: Where what was there before is put back, or the attribute taken
            away if the object itself had none of that name.
        owner: Any object with a `__dict__`.
        name: String.
        value: Anything.
    """
    own = vars(owner)
    if name in own:
        undo.callback(own.__setitem__, name, own[name])
    else:
        undo.callback(own.pop, name)
    own[name] = value
