"""Reads the graphs of Functional and Sequential models, and runs them."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras.src import backend

from tfmix import _formats
from tfmix._keras import layers, replacing

# A Functional model runs its operations with this method.
RUN_GRAPH = "_run_through_graph"


def maker(tensor: keras.KerasTensor) -> tuple[Any, list]:
    """Returns the operation that made a symbolic tensor, and its inputs."""
    operation, node, _ = tensor._keras_history
    nodes = operation._inbound_nodes
    return operation, nodes[node].input_tensors if nodes else []


def packed_results(model: keras.Layer, tensors: list) -> Any:
    """Packs tensors as a Functional model packs its results."""
    return keras.tree.pack_sequence_as(model._outputs_struct, tensors)


def parts(model: keras.Layer) -> list[keras.Function]:
    """Groups the operations of a graph by the results that they reach.

    Returns:
        For each group the function from what it takes to what it passes to
        others or returns. No group takes from a later one.
    """
    symbols = layers.results(model)
    reached: dict[int, set[int]] = collections.defaultdict(set)
    for place, symbol in enumerate(symbols):
        reached[id(symbol)].add(place)
    groups: dict[frozenset[int], list] = collections.defaultdict(list)
    for _, nodes in sorted(model._nodes_by_depth.items()):
        for node in nodes:
            if not node.is_input:
                own = set().union(*(reached[id(x)] for x in node.outputs))
                groups[frozenset(own)].append(node)
                for x in node.input_tensors:
                    reached[id(x)] |= own
    made: list[keras.Function] = []
    needed = {id(x) for x in symbols}
    # Operations that reach fewer results use those that reach more.
    for _, nodes in sorted(groups.items(), key=lambda item: len(item[0])):
        made_here = {id(x): x for node in nodes for x in node.outputs}
        taken = {id(x): x for node in nodes for x in node.input_tensors}
        takes = [x for key, x in taken.items() if key not in made_here]
        gives = [x for key, x in made_here.items() if key in needed]
        needed.update(map(id, takes))
        made.insert(0, keras.Function(takes, gives))
    return made


def run_part(part: keras.Function, inputs: list, operation_fn: Callable) -> Any:
    """Runs a part of a graph; `operation_fn` prepares each operation."""
    return part._run_through_graph(inputs, operation_fn)


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
    replacing.swap(undo, tensor, "_dtype", dtype)


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
            replacing.swap(undo, operation, name, made)
        yield


def run_on_shapes(function: Callable, inputs: list) -> Any:
    """Runs a function on `keras.KerasTensor`s, computing nothing."""
    return backend.compute_output_spec(function, *inputs)


def widen_inputs(layer: Any) -> Callable[[], None]:
    """Makes a nested model pass its inputs on in float32; returns an undo."""
    # A Functional or Sequential model casts to the dtype of its symbolic
    # inputs. Each layer inside casts its own inputs anyway.
    graph = getattr(layer, "_functional", None) or layer
    noted = []
    for tensor in getattr(graph, "_inputs", None) or ():
        # Calls read the dtype of the tensor; saved files read that of its
        # layer.
        history = getattr(tensor, "_keras_history", None)
        for holder in (tensor, getattr(history, "operation", None)):
            dtype = vars(holder).get("_dtype") if holder is not None else None
            if dtype in _formats.SIXTEEN_BIT:
                layers.put(holder, "_dtype", _formats.FLOAT32.name)
                noted.append((holder, dtype))

    def restore() -> None:
        for holder, dtype in noted:
            layers.put(holder, "_dtype", dtype)

    return restore


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
                replacing.swap(undo, layer, "_dtype_policy", policy)
                undo.callback(widen_inputs(layer))
        yield
