"""What TensorFlow records of gradients, and what it takes instead."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfmix._keras import layers, replacements

# What records the gradient that a user's function returns.
CUSTOM: tuple[replacements.Place, ...] = ()
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.eager import forwardprop_util, record
    from tensorflow.python.ops import custom_gradient, gradients_util

    CUSTOM = (
        (custom_gradient, "_eager_mode_decorator"),
        (custom_gradient, "_graph_mode_decorator"),
    )

# Of a graph, the gradients of one's own in it, by name.
_OF_GRAPH = "_tfmix_gradients"
_numbers = itertools.count()

# Takes what enters backwards, a tensor for each result; returns what leaves.
Gradient = Callable[..., list]


def is_recorded() -> bool:
    """Says whether a tape is around what runs now."""
    return bool(record.could_possibly_record())


def may_be_asked() -> bool:
    """Says whether gradients of what runs now may be asked for.

    By a tape around the caller. What a graph holds that was traced without
    one, outside of training, is TensorFlow's own: it can be exported. Forward
    accumulators have no gradient of one's own. JAX asks later, of anything.
    """
    if keras.backend.backend() != "tensorflow":
        return True
    if runs_forward():
        return False
    is_graph = not tf.executing_eagerly()
    return is_recorded() or (is_graph and layers.is_training())


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Hides what runs in a block from all tapes."""
    hidden: contextlib.AbstractContextManager[None] = record.stop_recording()
    return hidden


def local(tensor: Any) -> Any:
    """Returns a tensor of the graph that is traced now.

    The gradient of a branch takes nothing from around the branch but by what
    the branch has captured.
    """
    if tf.executing_eagerly():
        return tensor
    graph = tf.compat.v1.get_default_graph()
    is_here = getattr(tensor, "graph", None) is graph
    return tensor if is_here else tf.identity(tensor)


def reach(tensor: Any) -> bool:
    """Says whether a gradient asked of what runs now may reach a tensor."""
    if is_recorded():
        return bool(record.should_record_backprop([tensor]))
    # An eager one has none.
    graph = getattr(tensor, "graph", None)
    return graph is not None and graph is tf.compat.v1.get_default_graph()


def by_way_of(source: Any, tensor: Any) -> Any:
    """Returns a float tensor of which gradients by another may be asked, too.

    Args:
        source: What was made of `tensor` and is as good: a cast. A tape that
            watches it alone has the gradient by it.
        tensor: Float tensor. All other tapes have the gradient by it.
    """
    if not is_recorded() or runs_forward():
        return tensor
    with record.stop_recording():
        made = tf.identity(tensor)

    def by_source(upstream: Any) -> list:
        return [tf.cast(upstream, source.dtype)]

    # A tape takes the last one that it has recorded.
    record.record_operation("Tfmix", [made], [source], by_source)
    record.record_operation("Tfmix", [made], [tensor], lambda up: [up])
    return made


def runs_forward() -> bool:
    """Says whether a `tf.autodiff.ForwardAccumulator` is around the caller."""
    return bool(forwardprop_util.pack_tangents([]).indices)


def and_variables(function: Callable, *args: Any) -> tuple[Any, list]:
    """Returns what a function returns, and the trainable variables it reads."""
    with record.VariableWatcher() as watcher:
        result = function(*args)
    return result, list(watcher.watched_variables())


def replaced(
    results: Sequence,
    tensors: Sequence,
    variables: Sequence,
    by_tape: Gradient,
    by_graph: Gradient,
) -> list:
    """Returns tensors whose gradient is computed by functions of one's own.

    As `tf.custom_gradient` does it, which reads every variable twice, makes
    zeros for each, and keeps the graph alive for good.

    Args:
        results: Float tensors.
        tensors: The float tensors that they were made of.
        variables: The variables that were read for them.
        by_tape: What a tape calls; it returns the gradients of the tensors,
            then of the variables, `None` where there is none.
        by_graph: What is called where gradients are asked of a graph, as
            those of a nested `tf.function` are. The graph holds it.

    Returns:
        Tensors of the values of `results`.
    """
    if not results:
        return []
    with record.stop_recording():
        if tf.executing_eagerly():
            made = [tf.identity(result) for result in results]
        else:
            inputs = [*results, *tensors, *handles(variables)]
            with _named(by_graph, len(results)):
                made = tf.identity_n(inputs)[: len(results)]
    sources = [*tensors, *(variable.handle for variable in variables)]
    record.record_operation("Tfmix", made, sources, by_tape)
    return made


def _named(gradient: Gradient, count: int) -> Any:
    """Gives the identities that are made in a block a gradient."""
    graph = tf.compat.v1.get_default_graph()
    name = f"Tfmix{next(_numbers)}"
    if not hasattr(graph, _OF_GRAPH):
        setattr(graph, _OF_GRAPH, {})
    getattr(graph, _OF_GRAPH)[name] = gradient
    # TensorFlow knows the name for good: it must not know the graph.
    reference = weakref.ref(graph)

    def of_name(operation: Any, *upstream: Any) -> list:
        known = getattr(reference(), _OF_GRAPH)[name]
        return [*[None] * count, *known(*upstream[:count])]

    tf.RegisterGradient(name)(of_name)
    return graph.gradient_override_map({"IdentityN": name})


def handles(variables: Sequence) -> list:
    """Returns what the code traced now knows variables that it reads by."""
    # A branch of a conditional, once complete, would take them for others.
    own = [variable.handle for variable in variables]
    if tf.executing_eagerly():
        return own
    graph = tf.compat.v1.get_default_graph()
    return [graph.capture(handle) for handle in own]


def of_graph(
    results: Sequence, tensors: Sequence, handles: Sequence, by: Sequence
) -> list:
    """Returns gradients of what was traced, as a tape would have it.

    Args:
        results: Tensors of one graph, which may be another one's by now.
        tensors: What they were made of, which is not gone beyond.
        handles: Of the variables that were read for them.
        by: What enters backwards, a tensor for each result.
    """
    gradients: list = gradients_util._GradientsHelper(
        list(results),
        [*tensors, *handles],
        list(by),
        stop_gradients=list(tensors),
        src_graph=results[0].graph,
    )
    return gradients
