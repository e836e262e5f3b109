"""Reads and replaces gradients: those that TensorFlow records, and users' own.

Users write gradient functions with `tf.custom_gradient`, `jax.custom_vjp` or
`keras.ops.custom_gradient`.
"""

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import context, layers, replacing

# The backend calls one of these for a function with a gradient of its own.
CUSTOM: tuple[replacing.Place, ...] = ()
# TensorFlow calls these to form gradients, by a tape or of a graph.
GRADIENTS: tuple[replacing.Place, ...] = ()
# Users call this to get gradients by a tensor.
WATCH: tuple[replacing.Place, ...] = ()
# TensorFlow calls this to find the trace of a `tf.function` for a call.
TRACE: tuple[replacing.Place, ...] = ()
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.eager import (
        forwardprop_util,
        imperative_grad,
        record,
    )
    from tensorflow.python.eager.polymorphic_function import function_context
    from tensorflow.python.ops import (
        control_flow_v2_func_graphs,
        custom_gradient,
        gradients_util,
    )

    CUSTOM = (
        (custom_gradient, "_eager_mode_decorator"),
        (custom_gradient, "_graph_mode_decorator"),
    )
    GRADIENTS = (
        (imperative_grad, "imperative_grad"),
        (gradients_util, "_GradientsHelper"),
    )
    WATCH = ((tf.GradientTape, "watch"),)
    TRACE = ((function_context, "make_function_context"),)
else:
    import jax

    CUSTOM = ((jax.custom_vjp, "__call__"),)

# A graph holds its own gradient functions under this name.
_OF_GRAPH = "_tfmix_gradients"
_LOOPS = "While", "StatelessWhile"
_numbers = itertools.count()
# Scaling changes nothing in the gradients of these packages' functions, which
# are linear in what comes in.
_LINEAR = {"tensorflow", "jax", "keras", "tfmix"}

# Takes a gradient for each result, and returns one for each input.
Gradient = Callable[..., list]


def is_recorded() -> bool:
    """Returns whether a tape records the running code."""
    return bool(record.could_possibly_record())


def may_be_asked() -> bool:
    """Returns whether a caller may ask for gradients of the running code.

    Under TensorFlow only a tape around the caller can. A graph that is traced
    without a tape, outside training, keeps TensorFlow's own operations, so it
    can be exported. Forward accumulators do not support custom gradients. JAX
    may ask for the gradient of anything later.
    """
    if keras.backend.backend() != "tensorflow":
        return True
    is_taped = is_recorded()
    if not is_taped and not tf.executing_eagerly():
        is_taped = context.is_training()
    accumulators = forwardprop_util.pack_tangents([]).indices
    return is_taped and not accumulators


def traced_for_gradients(original: Callable) -> Callable:
    """Traces a `tf.function` again for a caller that may ask for gradients.

    Its first trace, for a call without a tape, holds nothing for gradients.
    """

    @functools.wraps(original)
    def make_function_context(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if not may_be_asked():
            return found
        return type(found)((found.context, "gradients"), found.scope_type)

    return make_function_context


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Hides the operations of a block from all tapes."""
    hidden: contextlib.AbstractContextManager[None] = record.stop_recording()
    return hidden


def local(tensor: Any) -> Any:
    """Returns a tensor of the graph that is traced now.

    The gradient of a branch can only use tensors that the branch has captured.
    """
    if tf.executing_eagerly():
        return tensor
    graph = tf.compat.v1.get_default_graph()
    is_here = getattr(tensor, "graph", None) is graph
    return tensor if is_here else tf.identity(tensor)


def function() -> Any:
    """Returns a token of the `tf.function` that is traced now.

    Loops and branches are part of it. It is `context.EAGER` in eager code.
    """
    if tf.executing_eagerly():
        return context.EAGER
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return weakref.ref(graph)


def reach(tensor: Any) -> bool:
    """Returns whether a gradient of the running code may reach a tensor."""
    if is_recorded():
        return bool(record.should_record_backprop([tensor]))
    # An eager tensor has no graph.
    graph = getattr(tensor, "graph", None)
    return graph is not None and graph is tf.compat.v1.get_default_graph()


def with_dense_gradient(tensor: Any) -> Any:
    """Returns a tensor whose gradient by rows is summed in its own dtype.

    TensorFlow would cast the rows first. JAX has no gradients by rows.
    """
    if keras.backend.backend() != "tensorflow":
        return tensor
    return tf.reshape(tensor, tf.shape(tensor))


def without_rules(original: Callable) -> Callable:
    """Forms gradients by TensorFlow's own arithmetic.

    A gradient that a wide op computed would not have its tensor's dtype.
    """

    @functools.wraps(original)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        with context.holding(rules=context.NO_RULES):
            return original(*args, **kwargs)

    return gradients


def watcher() -> Any:
    """Returns a context that notes the trainable variables read in it."""
    return record.VariableWatcher()


def replaced(
    results: Sequence,
    tensors: Sequence,
    variables: Sequence,
    by_tape: Gradient,
    by_graph: Gradient | None = None,
) -> list:
    """Returns tensors whose gradients other functions compute.

    `tf.custom_gradient` does the same, but reads every variable twice, makes
    zeros for each, and keeps the graph alive forever.

    Args:
        results: Float tensors.
        tensors: The float tensors that they were computed from.
        variables: The variables that were read for them.
        by_tape: A tape calls it. It returns the gradients of the tensors, then
            those of the variables; `None` where there is none.
        by_graph: Called where gradients of a graph are computed, such as a
            nested `tf.function`. The graph holds it. Defaults to `by_tape`.

    Returns:
        Tensors with the values of `results`.
    """
    if not results:
        return []
    with record.stop_recording():
        if tf.executing_eagerly():
            made = [tf.raw_ops.Identity(input=result) for result in results]
        else:
            inputs = [*results, *tensors, *handles(variables)]
            with _named(by_graph or by_tape, len(results)):
                made = tf.identity_n(inputs)[: len(results)]
    sources = [*tensors, *(variable.handle for variable in variables)]
    record_as(made, sources, by_tape)
    return made


def record_as(results: Sequence, sources: Sequence, gradient: Gradient) -> None:
    """Records how a gradient of results that no tape has recorded is formed."""
    record.record_operation("Tfmix", results, sources, gradient)


def _named(gradient: Gradient, count: int) -> Any:
    """Sets the gradient function of the identities that a block creates."""
    graph = tf.compat.v1.get_default_graph()
    name = f"Tfmix{next(_numbers)}"
    if not hasattr(graph, _OF_GRAPH):
        setattr(graph, _OF_GRAPH, {})
    getattr(graph, _OF_GRAPH)[name] = gradient
    # TensorFlow never forgets the name, so it must not hold the graph.
    reference = weakref.ref(graph)

    def of_name(operation: Any, *upstream: Any) -> list:
        known = getattr(reference(), _OF_GRAPH)[name]
        return [*[None] * count, *known(*upstream[:count])]

    tf.RegisterGradient(name)(of_name)
    return graph.gradient_override_map({"IdentityN": name})


def handles(variables: Sequence) -> list:
    """Returns the handles under which the traced code reads variables."""
    # A completed branch of a conditional would not recognize its own handles.
    own = [variable.handle for variable in variables]
    if tf.executing_eagerly():
        return own
    graph = tf.compat.v1.get_default_graph()
    return [graph.capture(handle) for handle in own]


def of_tape(
    tape: Any, results: Sequence, sources: Sequence, by: Sequence
) -> list:
    """Returns gradients of eager results, as `tape.gradient` does.

    That takes nests of variables and composite tensors, which it looks through
    for as long as a small model's gradient takes.

    Args:
        tape: A tape that recorded the results.
        results: Tensors.
        sources: The tensors, and handles of variables, that get gradients.
        by: The gradients of the results, a tensor for each.
    """
    gradients: list = imperative_grad.imperative_grad(
        tape._tape, list(results), list(sources), output_gradients=list(by)
    )
    return gradients


def of_graph(
    results: Sequence, sources: Sequence, by: Sequence, ends: Sequence
) -> list:
    """Returns gradients of traced results, as a tape would compute them.

    Args:
        results: Tensors of one graph, not necessarily the current one.
        sources: The tensors, and handles of variables, that get gradients.
        by: The gradients of the results, a tensor for each.
        ends: The tensors at which the backward pass ends.
    """
    graph = results[0].graph
    with _without_needless(sources, graph):
        gradients: list = gradients_util._GradientsHelper(
            list(results),
            list(sources),
            list(by),
            stop_gradients=list(ends),
            src_graph=graph,
        )
    return gradients


@contextlib.contextmanager
def _without_needless(sources: Sequence, graph: Any) -> Iterator[None]:
    """Lets loops skip gradients of what does not depend on the sources.

    A tape tells a loop which gradients it needs. Otherwise each step computes
    those of all tensors, and nothing removes them later.
    """
    reached: set = set()
    origins = [tensor.op for tensor in sources]
    gradients_util._MarkReachedOps(origins, reached, [graph])
    loops = [op for op in reached if op.type in _LOOPS]
    for loop in loops:
        loop.skip_input_indices = [
            n for n, x in enumerate(loop.inputs) if x.op not in reached
        ]
    try:
        yield
    finally:
        for loop in loops:
            loop.skip_input_indices = None


def is_linear(function: Callable) -> bool:
    """Returns whether a function's gradient grows with what comes in."""
    return (function.__module__ or "").partition(".")[0] in _LINEAR


def say_scaled() -> None:
    """Says that a gradient function of the running layer is not unscaled."""
    layer = layers.running_path()
    _messages.warn_once(
        f"a gradient function in layer {layer!r} gets gradients that are "
        "multiplied by a power of two, because it is called inside a compiled "
        "function or a loop. A gradient that clips or takes a sign is then "
        "wrong; call it outside of that, or give the layer dtype='float32' in "
        "a model of its own",
        about=("scaled gradient", layer),
    )


def users_function(function: Any) -> Callable:
    """Returns the function that a user gave to JAX, from a `custom_vjp`.

    What `jax.custom_gradient` got is a part of the function that it makes.
    """
    inner: Callable = function.fun
    if inner.__module__ != jax.custom_gradient.__module__:
        return inner
    held = inspect.getclosurevars(inner).nonlocals
    return held.get("fun", inner)
