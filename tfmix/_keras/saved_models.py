"""Gives TensorFlow's SavedModels the variables that our code adds to a step.

A function can be saved only if some object that is saved holds each variable
that it uses. Checkpoints and Keras's files stay as they are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfmix._keras import compilation

# This method lists what an object holds, for a SavedModel or a checkpoint.
CHILDREN = "_trackable_children"


def children(
    original: Callable,
    variables: Callable[[], Sequence],
    save_type: str = "checkpoint",
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns what an object holds; in a SavedModel also some variables.

    Args:
        original: The object's own `_trackable_children`.
        variables: Returns the variables.
        save_type: What is written: `"checkpoint"` or `"savedmodel"`.
        **kwargs: Further arguments of the method.
    """
    held: dict[str, Any] = original(save_type, **kwargs)
    if save_type != "savedmodel":
        return held
    more = map(compilation.backend_variable, variables())
    return held | {f"tfmix_{n}": each for n, each in enumerate(more)}


def save_with(owner: Any, variable: keras.Variable) -> None:
    """Saves a variable in the SavedModels that an object is part of."""
    own = getattr(owner, CHILDREN)
    held = functools.partial(children, own, lambda: [variable])
    object.__setattr__(owner, CHILDREN, held)
