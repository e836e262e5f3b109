"""What a failed call of a layer has assigned and added, and how it is undone.

Nothing can be undone in a graph that TensorFlow traces, and replicas wait for
each other at what they assign: there the first call is tried in a graph of its
own, that nobody runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common import stateless_scope

from tfmix._keras import layers, variables

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

_KERAS = "keras.src.layers."


def would_last(layer: keras.Layer) -> bool:
    """Says whether what a call assigns here cannot be taken back.

    No call of a layer that is Keras's own, and nobody else's inside, has to.
    """
    if not _is_traced() or not layers.is_built(layer):
        return False
    inside = layers.flat_layers(layer)
    known = all(type(inner).__module__.startswith(_KERAS) for inner in inside)
    return not known and bool(_state(layer))


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Runs a block in a graph of its own, in which nothing is assigned."""
    graph = tf.__internal__.FuncGraph("tfmix_scratch")
    with keras.StatelessScope(), graph.as_default():
        yield


def noted(layer: keras.Layer, is_new: bool) -> Callable[[], None]:
    """Notes what a call may assign and add; returns what takes it back.

    Outside of a stateless scope only for a new call: values are copied.
    """
    scope, values = stateless_scope.get_stateless_scope(), []
    if scope is not None:
        mapping, losses = dict(scope.state_mapping), list(scope.losses)
    elif is_new and not _is_traced():
        values = [(v, _value(v)) for v in _state(layer)]

    def restore() -> None:
        if scope is not None:
            scope.state_mapping, scope.losses = dict(mapping), list(losses)
        else:
            for variable, value in values:
                variable.assign(value)
        for inner in layers.flat_layers(layer):
            # Those of a call that failed would count twice.
            inner._losses.clear()
            inner._loss_ids.clear()

    return restore


def _is_traced() -> bool:
    """Says whether TensorFlow traces what a graph will run."""
    if keras.backend.backend() != "tensorflow" or tf.executing_eagerly():
        return False
    return stateless_scope.get_stateless_scope() is None


def _state(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables that a layer's call itself may assign to."""
    inside = layers.flat_layers(layer)
    state = [v for inner in inside for v in variables.own_state(inner)]
    return [variable for variable in state if variable._value is not None]


def _value(variable: keras.Variable) -> Any:
    value = variable._value
    return tf.identity(value) if hasattr(value, "assign") else value
