"""What a layer's failed call leaves behind, and how it is taken back."""

import threading
from typing import Any

import keras
from keras.src.backend.common import stateless_scope

from tfmix._keras import layers, variables

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

_SPARES = "_tfmix_spares"
# What can be restored, and what it was.
State = tuple[Any, Any]


def state() -> State | None:
    """Notes what a call may assign to; what it does eagerly is not noted."""
    scope = stateless_scope.get_stateless_scope()
    if scope is not None:
        return scope, (dict(scope.state_mapping), list(scope.losses))
    if keras.backend.backend() != "tensorflow" or tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    # It counts the operations.
    return graph, graph.version


def restore(before: State | None, layer: keras.Layer) -> None:
    """Takes back what a failed call of a layer assigned and added."""
    if before is not None:
        where, noted = before
        if isinstance(where, keras.StatelessScope):
            where.state_mapping, where.losses = noted
        else:
            _divert(where, noted, layer)
    for each in layers.flat_layers(layer):
        # Those of a call that failed would count twice.
        each._losses.clear()
        each._loss_ids.clear()


def _divert(graph: Any, start: int, layer: keras.Layer) -> None:
    """Lets what a graph's latest operations assign reach no variable."""
    # No operation can be removed, and those that assign always run.
    found = {}
    for variable in layer.variables:
        handle = getattr(variables.local(variable._value), "handle", None)
        if handle is not None:
            found[id(graph.capture(handle))] = variable
    spares: dict[int, Any] = {}
    for operation in graph.get_operations()[start:]:
        for place, tensor in enumerate(operation.inputs):
            variable = found.get(id(tensor))
            if variable is not None:
                if id(variable) not in spares:
                    spares[id(variable)] = _spare(variable)
                handle = graph.capture(spares[id(variable)].handle)
                operation._update_input(place, handle)
    # For as long as the layer's graphs may run.
    kept = vars(layer).get(_SPARES, [])
    object.__setattr__(layer, _SPARES, [*kept, *spares.values()])


def _spare(variable: keras.Variable) -> Any:
    """Makes a variable of the same form that nobody reads."""
    made = []

    def make() -> None:
        made.append(tf.Variable(tf.zeros(variable.shape, variable.dtype)))

    # A `tf.function` that is traced in this thread would take it for its own.
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
