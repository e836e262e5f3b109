"""Undoes what a failed call of a layer has assigned and added.

A graph that TensorFlow traces cannot be undone, and replicas wait for each
other at assignments. There the first call is tried in a separate graph that
never runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfmix._keras import global_state, layers, variables

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf


def would_last(layer: keras.Layer) -> bool:
    """Returns whether the assignments of a call cannot be undone here.

    Keras's own layers do not need that, unless they hold a layer that is not
    Keras's.
    """
    if not _is_traced() or not layers.is_built(layer):
        return False
    known = all(map(layers.is_builtin, layers.flat_layers(layer)))
    return not known and bool(_state(layer))


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Runs a block in a separate graph, in which nothing is assigned."""
    graph = tf.__internal__.FuncGraph("tfmix_scratch")
    with keras.StatelessScope(), graph.as_default():
        yield


def noted(layer: keras.Layer, is_new: bool) -> Callable[[], None]:
    """Notes what a call may assign and add; returns a function that undoes it.

    Outside a stateless scope it notes only new calls, because it copies the
    values.
    """
    scope, values = global_state.open_scope(), []
    if scope is not None:
        restore_scope = global_state.noted_scope(scope)
    elif is_new and not _is_traced():
        values = [(v, _value(v)) for v in _state(layer)]

    def restore() -> None:
        if scope is not None:
            restore_scope()
        for variable, value in values:
            variable.assign(value)
        for inner in layers.flat_layers(layer):
            # The losses of a failed call would count twice.
            inner._losses.clear()
            inner._loss_ids.clear()

    return restore


def _is_traced() -> bool:
    """Returns whether TensorFlow traces a graph that will run."""
    if keras.backend.backend() != "tensorflow" or tf.executing_eagerly():
        return False
    return global_state.open_scope() is None


def _state(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables that a layer's call itself may assign to."""
    inside = layers.flat_layers(layer)
    state = [v for inner in inside for v in variables.own_state(inner)]
    return [variable for variable in state if variable._value is not None]


def _value(variable: keras.Variable) -> Any:
    value = variable._value
    return tf.identity(value) if hasattr(value, "assign") else value
