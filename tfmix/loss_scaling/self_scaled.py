"""Models whose gradients are scaled inside them, and true outside.

Nothing has to be multiplied or divided around such a model: whatever scales
its loss is taken in at the border and handed out again, to the last bit.
"""

import weakref
from collections.abc import Iterable

import keras

from tfmix._keras import variables as keras_variables

_models: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def add(model: keras.Model) -> None:
    """Notes that a model scales its own gradients."""
    _models.add(model)


def discard(model: keras.Model) -> None:
    """Notes that a model does so no more."""
    _models.discard(model)


def hold(variables: Iterable[keras.Variable]) -> bool:
    """Says whether all of these belong to such models.

    A variable of 16 bit does not count: its gradient has 16 bits outside of
    the model, too, and may underflow there.
    """
    held = {id(variable) for model in _models for variable in model.variables}
    return all(
        id(variable) in held and not keras_variables.is_narrow(variable)
        for variable in variables
    )
