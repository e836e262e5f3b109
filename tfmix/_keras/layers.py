"""Reads what Keras's layers hold, and calls them."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras.src import backend
from keras.src.backend.common import (
    masking,
    variables,
)
from keras.src.models import functional
from keras.src.trainers import compile_utils

from tfmix import _formats
from tfmix._keras import global_state, layer_policies, replacements

# It casts each variable that a layer reads.
AUTOCAST: replacements.Place = (variables.Variable, "_maybe_autocast")
# Layers write to their variables with this method.
ASSIGN: replacements.Place = (variables.Variable, "assign")
# This method runs the time steps of a recurrent layer.
LOOP: replacements.Place = (keras.layers.RNN, "inner_loop")
# The base class of preprocessing layers; its name changed after Keras 3.12.
DATA_LAYER: type = keras.layers.Rescaling.__bases__[0]
_BROKEN_BY_CASTS = (
    keras.layers.Embedding,
    DATA_LAYER,
    keras.Sequential,
    keras.layers.Masking,
    keras.layers.SpectralNormalization,
    keras.layers.Lambda,
    keras.layers.TFSMLayer,
)
# tfmix adds only this attribute to a layer.
_MARKS = "_tfmix_marks"
# A Functional model runs its operations with this method.
RUN_GRAPH = "_run_through_graph"


@dataclasses.dataclass(frozen=True)
class Marks:
    """Everything that tfmix stores on one layer.

    Attributes:
        by_policy: Whether the policy chose the dtype rather than the user.
        float8: Why it does not multiply in float8, "" if it does; `None` if
            that has not been decided.
        methods: The owner of the wrapped methods.
    """

    by_policy: bool = False
    float8: str | None = None
    methods: Any = None


_NO_MARKS = Marks()


def marks(layer: keras.Layer) -> Marks:
    """Returns what tfmix stores on a layer."""
    kept: Marks = vars(layer).get(_MARKS, _NO_MARKS)
    return kept


def mark(layer: keras.Layer, **values: Any) -> None:
    """Changes what tfmix stores on a layer, by the names of `Marks`."""
    kept = dataclasses.replace(marks(layer), **values)
    # Keras tracks what is set on a layer as its state.
    vars(layer)[_MARKS] = kept
    if kept == _NO_MARKS:
        del vars(layer)[_MARKS]


def is_structure(layer: Any) -> bool:
    """Returns whether a layer only connects others: Sequential, Functional."""
    # A subclass with its own `call` may compute anything.
    own = keras.Sequential.call, functional.Functional.call
    return getattr(type(layer), "call", None) in own


def is_graph(layer: Any) -> bool:
    """Returns whether a layer is Functional, without a `call` of its own."""
    return getattr(type(layer), "call", None) is functional.Functional.call


def is_input(layer: Any) -> bool:
    """Returns whether a layer is the `Input` of a graph or Sequential."""
    return isinstance(layer, keras.layers.InputLayer)


def is_builtin(layer: Any) -> bool:
    """Returns whether a layer's class is part of Keras."""
    return type(layer).__module__.split(".")[0] == "keras"


def takes_casts(layer: Any) -> bool:
    """Returns whether casts of a Keras layer's inputs do no harm.

    It is false for layers that run the user's code, such as `Lambda`.
    """
    return is_builtin(layer) and not isinstance(layer, _BROKEN_BY_CASTS)


def inner_operations(layer: Any) -> list:
    """Returns what a layer holds: layers, and the ops of a graph."""
    if isinstance(layer, keras.Sequential):
        return list(layer.layers)
    if is_structure(layer):
        return list(layer.operations)
    return list(getattr(layer, "_layers", []))


def flat_layers(layer: Any) -> list:
    """Returns a layer and all layers inside it, each once, in order."""
    by_id: dict[int, keras.Layer] = {}

    def visit(outer: keras.Layer) -> None:
        if id(outer) not in by_id:
            by_id[id(outer)] = outer
            # Keras's own walk reverses the order inside inner models.
            for inner in outer._layers:
                visit(inner)

    if isinstance(layer, keras.Layer):
        visit(layer)
    return list(by_id.values())


def unlisted_variables(model: keras.Model) -> list:
    """Lists the variables on a model's layers that Keras does not list.

    These are the states of stateful RNNs, and TensorFlow's own variables.
    """
    if keras.backend.backend() != "tensorflow":
        # Keras passes them to no step that JAX compiles.
        return []
    import tensorflow as tf

    held = tf.train.TrackableView(model).descendants()
    kinds = keras.optimizers.Optimizer | keras.Metric
    known = {id(variable) for variable in model.variables}
    for owner in filter(lambda x: isinstance(x, kinds), held):
        known.update(map(id, tf.train.TrackableView(owner).descendants()))
    return [
        x
        for x in held
        if isinstance(x, keras.Variable | tf.Variable) and id(x) not in known
    ]


def called(model: keras.Layer) -> list[keras.Layer]:
    """Returns a model and all layers inside it that can be called."""
    return [x for x in flat_layers(model) if not is_input(x)]


def is_built(model: keras.Layer) -> bool:
    """Returns whether a model and all layers inside it are built."""
    return all(layer.built for layer in flat_layers(model))


def own_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers that a layer holds directly."""
    return list(layer._layers)


def rematerialize_alike(layer: keras.Layer, other: keras.Layer) -> None:
    """Gives a layer the `keras.RematScope` of another layer."""
    mode = getattr(other, "_remat_mode", None)
    if mode is not None:
        layer_policies.put(layer, "_remat_mode", mode)
        rematerialize_anew(layer)


def rematerialize_anew(layer: keras.Layer) -> None:
    """Makes JAX trace a layer's own `call` again when it recomputes it."""
    # JAX caches the trace of a function, including the tracers around it.
    # Keras's bound method is a new object in each call, but an instance
    # attribute is not.
    if getattr(layer, "_remat_mode", None) is None:
        return
    original = type(layer).rematerialized_call.__get__(layer)

    def rematerialized_call(call: Callable, *args: Any, **kwargs: Any) -> Any:
        # JAX would make arrays of `training` and similar arguments.
        static = {k: v for k, v in kwargs.items() if isinstance(v, bool)}

        def of_static(*args: Any, **kwargs: Any) -> Any:
            # Keras 3.16 keeps `training` static as well, and passes it here.
            return call(*args, **{**kwargs, **static})

        rematerialized = original(of_static, *args, **kwargs)

        def of_arrays(*args: Any, **kwargs: Any) -> Any:
            arrays = {k: v for k, v in kwargs.items() if k not in static}
            return rematerialized(*args, **arrays)

        return of_arrays

    layer_policies.put(layer, "rematerialized_call", rematerialized_call)


def results(model: keras.Layer) -> list:
    """Returns the symbolic results of a Functional or Sequential model."""
    graph = getattr(model, "_functional", None) or model
    return keras.tree.flatten(getattr(graph, "outputs", None) or [])


def maker(tensor: keras.KerasTensor) -> tuple[Any, list]:
    """Returns the operation that made a symbolic tensor, and its inputs."""
    operation, node, _ = tensor._keras_history
    nodes = operation._inbound_nodes
    return operation, nodes[node].input_tensors if nodes else []


def packed_results(model: keras.Layer, tensors: list) -> Any:
    """Packs tensors as a Functional model packs its results."""
    return keras.tree.pack_sequence_as(model._outputs_struct, tensors)


def graph_parts(
    model: keras.Layer,
) -> list[tuple[list, list[int], list[int]]]:
    """Groups the operations of a graph by the results that they reach.

    Returns:
        For each group its nodes, in the order in which Keras runs them, and the
        `id`s of the symbols that it takes from other groups, and of those that
        it passes to them or returns. No group takes from a later one.
    """
    symbols = results(model)
    reached: dict[int, set[int]] = collections.defaultdict(set)
    for place, symbol in enumerate(symbols):
        reached[id(symbol)].add(place)
    groups: dict[frozenset[int], list] = collections.defaultdict(list)
    for _, nodes in sorted(model._nodes_by_depth.items()):
        for node in reversed([node for node in nodes if not node.is_input]):
            own = set().union(*(reached[id(x)] for x in node.outputs))
            groups[frozenset(own)].insert(0, node)
            for x in node.input_tensors:
                reached[id(x)] |= own
    # Operations that reach fewer results use those that reach more.
    in_order = sorted(groups.items(), key=lambda item: -len(item[0]))
    parts: list[tuple[list, list[int], list[int]]] = []
    needed = {id(x) for x in symbols}
    for _, nodes in reversed(in_order):
        made = [id(x) for node in nodes for x in node.outputs]
        taken = [id(x) for node in nodes for x in node.input_tensors]
        takes = [key for key in dict.fromkeys(taken) if key not in made]
        gives = [key for key in dict.fromkeys(made) if key in needed]
        needed.update(takes)
        parts.insert(0, (nodes, takes, gives))
    return parts


def run_node(node: Any, values: dict[int, Any], operation_fn: Callable) -> Any:
    """Runs a node of a graph on values for its symbols, by their `id`s.

    Returns:
        Pairs of a symbol's `id` and its value.
    """
    args, kwargs = node.arguments.fill_in(values)
    made = operation_fn(node.operation)(*args, **kwargs)
    return zip(map(id, node.outputs), keras.tree.flatten(made), strict=False)


def noted_results(layer: keras.Layer) -> list[tuple[int, Any]]:
    """Returns a layer's results in the graphs it is in, with positions."""
    return [
        (place, tensor)
        for node in layer._inbound_nodes
        for place, tensor in enumerate(keras.tree.flatten(node.outputs))
    ]


def note_dtype(
    undo: contextlib.ExitStack, tensor: keras.KerasTensor, dtype: str
) -> None:
    """Corrects the dtype that a graph noted, until a stack unwinds."""
    replacements.swap(undo, tensor, "_dtype", dtype)


def attention_sizes(layer: keras.Layer) -> tuple[tuple | None, int | None]:
    """Returns the axes that attention uses, and the width of its values."""
    axes = getattr(layer, "_attention_axes", None)
    return axes, getattr(layer, "_value_dim", None)


def symbolic_arguments(model: keras.Model) -> list:
    """Returns symbolic arguments for a call of a model; empty if unknown."""
    structure = getattr(model, "_inputs_struct", None)
    if structure is not None:
        return [structure]
    if isinstance(model, keras.Sequential) and model.inputs:
        return list(model.inputs[:1])
    shapes = model._build_shapes_dict or {}
    return [*map(_symbols, shapes.values())]


def _symbols(shapes: Any) -> Any:
    # Keras notes shapes in containers of its own, which JAX does not accept.
    if isinstance(shapes, dict):
        return {name: _symbols(shape) for name, shape in shapes.items()}
    if any(isinstance(part, list | tuple) for part in shapes):
        return [*map(_symbols, shapes)]
    return keras.KerasTensor(shapes)


def knows_input_dtypes(model: keras.Model) -> bool:
    """Returns whether `symbolic_arguments` have the right dtypes."""
    is_sequential = isinstance(model, keras.Sequential) and model.inputs
    return hasattr(model, "_inputs_struct") or bool(is_sequential)


def call_in_training(model: keras.Model, inputs: Any) -> Any:
    """Calls a model in training mode, if it has modes."""
    knows_modes = getattr(model, "_call_has_training_arg", False)
    return model(inputs, training=True) if knows_modes else model(inputs)


def owns_random_numbers(layer: Any) -> bool:
    """Returns whether a layer, or a Keras layer in it, draws random numbers."""
    parts = flat_layers(layer) if is_builtin(layer) else [layer]
    return any(getattr(part, "_seed_generators", None) for part in parts)


@contextlib.contextmanager
def policies(plan: Mapping[Any, keras.DTypePolicy]) -> Iterator[None]:
    """Gives layers other dtype policies in a block."""
    # Keras's setter would write into the user's own `DTypePolicyMap`.
    with contextlib.ExitStack() as undo:
        for layer, policy in plan.items():
            before = vars(layer)["_dtype_policy"]
            # A policy that is not replaced may change inside the block; that
            # stays.
            if policy is not before:
                replacements.swap(undo, layer, "_dtype_policy", policy)
                undo.callback(layer_policies.widen_inputs(layer))
        yield


def autocast(dtype: str | None) -> Any:
    """Returns a scope in which variables are read in a dtype."""
    return variables.AutocastScope(dtype)


def casts_to_16_bit(variable: keras.Variable) -> bool:
    """Returns whether a read casts a float32 variable for a 16-bit layer."""
    scope = variables.get_autocast_scope()
    return (
        scope is not None
        and scope.dtype in _formats.SIXTEEN_BIT
        and bool(variable._autocast)
        and variable._dtype == "float32"
    )


def reading(original: Callable, copied: Callable) -> Callable:
    """Returns what reads a variable, by `copied` where a read casts it.

    Args:
        original: Keras's function of `AUTOCAST`.
        copied: Takes a variable and its value; returns the 16-bit copy.
    """

    @functools.wraps(original)
    def maybe_cast(self: Any, value: Any) -> Any:
        read = copied if casts_to_16_bit(self) else original
        return read(self, value)

    return maybe_cast


def kernel_of(layer: Any) -> keras.Variable | None:
    """Returns the variable of a layer's kernel, if it is built."""
    return getattr(layer, "_kernel", None)


@contextlib.contextmanager
def trial() -> Iterator[Any]:
    """Yields the open `keras.StatelessScope`, and restores it afterwards."""
    scope: Any = global_state.open_scope()
    restore = global_state.noted_scope(scope)
    try:
        yield scope
    finally:
        restore()


@contextlib.contextmanager
def calls_replaced(operations: list, make: Callable) -> Iterator[None]:
    """Replaces `operation.call` by `make(index, call)` in a block.

    In a quantized layer it replaces the method that Keras calls instead.
    """
    with contextlib.ExitStack() as undo:
        for index, operation in enumerate(operations):
            quantized = getattr(operation, "quantization_mode", None)
            name = "call" if quantized is None else "quantized_call"
            made = make(index, getattr(operation, name))
            replacements.swap(undo, operation, name, made)
        yield


def run_on_shapes(function: Callable, inputs: list) -> Any:
    """Runs a function on `keras.KerasTensor`s, computing nothing."""
    return backend.compute_output_spec(function, *inputs)


def put_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask, for the layers that use masks."""
    masking.set_keras_mask(tensor, mask)


def copy_mask(source: Any, destination: Any) -> None:
    """Copies the mask of one tensor, if it has one, to another."""
    mask = masking.get_keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(destination, mask)


def users_attributes(attributes: Mapping[str, Any]) -> list[str]:
    """Lists the attributes of a layer that Keras and TensorFlow have not set.

    Losses that calls have added are among Keras's.
    """
    return [
        name
        for name in attributes
        if name not in _KERAS_ATTRIBUTES and not name.startswith("_self_")
    ]


_KERAS_ATTRIBUTES = frozenset(vars(keras.layers.Layer(name="any")))


def added_losses(model: keras.Layer) -> list[tuple[keras.Layer, Any]]:
    """Lists the losses that calls have added, each with its layer."""
    return [
        (layer, loss)
        for layer in flat_layers(model)
        for loss in layer._get_own_losses()
    ]


def put_loss(layer: keras.Layer, before: Any, loss: Any) -> None:
    """Replaces a loss that a call has added to a layer.

    A loss that was added in another scope is not there; it is added.
    """
    if any(added is before for added in layer._losses):
        layer._losses[:] = [
            loss if added is before else added for added in layer._losses
        ]
    else:
        keras.Layer.add_loss(layer, loss)


def compile_loss(loss: Any, weights: Any = None, names: Any = None) -> Any:
    """Returns the function that `compile(loss=loss)` would train with."""
    return compile_utils.CompileLoss(
        loss=loss, loss_weights=weights, output_names=names
    )


def compiled_loss(model: Any) -> Any:
    """Returns a fresh copy of a model's compiled loss, None without one."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        return None
    return compile_loss(
        compiled._user_loss, compiled._user_loss_weights, compiled.output_names
    )


def losses(model: Any, outputs: Any) -> dict[tuple, Any]:
    """Returns the losses of a model's outputs, by the paths of these."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None:
        return {}
    if not compiled.built:
        # The model's own loss is built with its targets, so a copy is used.
        compiled = compiled_loss(model)
        compiled.build(outputs, outputs)
    return {tuple(entry.path): entry.loss for entry in compiled._flat_losses}


def compute_loss(model: keras.Model, **arguments: Any) -> Any:
    """Computes a model's loss as its training step does."""
    return model._compute_loss(**arguments)
