"""Writes and reads a loss-scale optimizer's state.

A file holds the state where a run without loss scaling has it: in the
optimizer's place what the inner optimizer saves, and beside it what only
scaling needs. So either run goes on from the other's file.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tfmix import _messages
from tfmix._keras import optimizers
from tfmix._keras import variables as keras_variables

# Keras's scaler saves these before the inner optimizer's variables. It does
# not use the first two, and has no others until it is built.
_KERAS_OWN = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


class OwnState(optimizers.Saveable):
    """The part of the state that a run without loss scaling lacks."""

    def __init__(self, variables: Callable[[], list[keras.Variable]]) -> None:
        self._variables = variables

    def save_own_variables(self, store: Any) -> None:
        """Writes every variable under its name."""
        for variable in self._variables():
            store[variable.name] = np.asarray(variable.numpy())

    def load_own_variables(self, store: Any) -> None:
        """Reads every variable that the file has, if it is of this model."""
        self.assign({name: np.asarray(store[name]) for name in store.keys()})

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets variables by name; what a file lacks keeps its value."""
        for variable in self._variables():
            array = arrays.get(variable.name)
            # The counts may be those of other variables, as `read` has said.
            if array is not None and array.shape == tuple(variable.shape):
                variable.assign(array)


def write(store: Any, optimizer: keras.optimizers.Optimizer) -> None:
    """Writes what a float32 run has in a loss-scale optimizer's place."""
    *_, bare = optimizers.chain(optimizer)
    for position, variable in enumerate(bare.variables):
        store[str(position)] = np.asarray(variable.numpy())


def read(
    store: Any, optimizer: keras.optimizers.Optimizer, own: OwnState
) -> None:
    """Reads the state of a run with tfmix, with Keras's scaler, or with none.

    It warns if the state does not fit, like Keras, because weights can be
    loaded into any model. If the optimizer is not built, Keras's warning is
    enough, and says what it says without loss scaling.

    Args:
        store: Maps positions, as strings, to arrays, as Keras opens a file.
        optimizer: The loss-scale optimizer.
        own: Its own state, which some files hold in the same place.
    """
    arrays = {str(key): np.asarray(store[key]) for key in store.keys()}
    wrapped = [*optimizers.chain(optimizer.inner_optimizer)]
    for inner in wrapped:
        named, saved = _parts(arrays, len(inner.variables))
        shapes = [tuple(variable.shape) for variable in inner.variables]
        if [array.shape for array in saved] == shapes:
            keras_variables.assign_all(inner.variables, saved)
            own.assign(named)
            # Keras asks them next, and has them say what a file lacks.
            for one in wrapped:
                optimizers.expect_no_state(one)
            return
    if optimizer.built:
        _messages.warn(
            "the state of optimizer %r was not restored: it has %d variables, "
            "and the file %d, of another optimizer or of other trainable "
            "variables; to go on with it, compile with the optimizer that was "
            "saved, and change what is trainable after loading.",
            optimizer.name,
            len(optimizer.inner_optimizer.variables),
            len(saved),
        )
    # Otherwise Keras asks the inner optimizer next, which says so.


def _parts(
    arrays: Mapping[str, np.ndarray], count: int
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Splits a saved state into own variables and the inner optimizer's.

    Args:
        arrays: All arrays by their keys.
        count: The number of variables that the inner optimizer has.
    """
    keys = map(str, range(len(arrays)))
    numbered = [arrays[key] for key in keys if key in arrays]
    own = len(numbered) - count
    if own not in (2, 4):
        return dict(arrays), numbered
    return dict(zip(_KERAS_OWN, numbered[:own], strict=False)), numbered[own:]
