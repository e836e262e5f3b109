"""What SavedModels hold beside an object's own, and files with a Lambda."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras.src.saving import serialization_lib

from tfmix._keras import variables as keras_variables

# This method lists what an object holds, for a SavedModel or a checkpoint.
CHILDREN = "_trackable_children"


def children(
    variables: Callable[[], Sequence],
    original: Callable,
    save_type: str = "checkpoint",
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns what an object holds; in a SavedModel also some variables.

    Args:
        variables: Returns the variables.
        original: The object's own `_trackable_children`.
        save_type: What is written: `"checkpoint"` or `"savedmodel"`.
        **kwargs: Further arguments of the method.
    """
    held: dict[str, Any] = original(save_type, **kwargs)
    if save_type != "savedmodel":
        return held
    more = map(keras_variables.backend_variable, variables())
    # Other parts of the object may have added theirs.
    return held | {f"tfmix_{n}": each for n, each in enumerate(more, len(held))}


def save_with(owner: Any, variables: Sequence[keras.Variable]) -> None:
    """Saves variables in the SavedModels that an object is part of."""
    own = getattr(owner, CHILDREN)
    held = functools.partial(children, lambda: variables, own)
    object.__setattr__(owner, CHILDREN, held)


def trusting() -> contextlib.AbstractContextManager:
    """Lets Lambda layers load, because the code is the caller's own."""
    return serialization_lib.SafeModeScope(False)
