"""Runs a graph with several results in parts, each with its own scaling.

A part holds the operations that reach the same results: the trunk is one part,
and each head another. Each head finds its own power of two, so gradients are
right even if losses differ by orders of magnitude. A part also ends at a result
that others are computed from, such as the mean beside a sample, so that
gradients with respect to it exist.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from tfmix._keras import context_values, graphs, layers
from tfmix.gradient_scaling import model_call
from tfmix.ops import tensors


class Call(NamedTuple):
    """One call of a model, in parts."""

    model: keras.Model
    parts: list["Part"]

    def run(self, inputs: Any, operation_fn: Callable) -> Any:
        """Runs the parts, and returns the results in their own dtypes."""
        model, given = self.model, keras.tree.flatten(inputs)
        # Maps the `id` of a symbol to its value and original dtype. Other parts
        # get the value in float32.
        known = {
            id(symbol): (value, "")
            for symbol, value in zip(model.inputs, given, strict=True)
        }
        for part in self.parts:
            taken = [known[key] for key in part.takes]
            arguments = operation_fn, taken
            made = model_call.between_gates(model, part.run, arguments, {})
            known.update(zip(part.gives, made, strict=True))
        made = [_narrow(*known[id(symbol)]) for symbol in layers.results(model)]
        return graphs.packed_results(model, made)


def run_graph(
    model: keras.Model,
    original: Callable,
    inputs: Any,
    operation_fn: Callable = lambda operation: operation,
    **kwargs: Any,
) -> Any:
    """Runs the graph of a Functional model; `original` is Keras's method."""
    call = context_values.block.get().around
    # Only the outermost graph runs in parts.
    if not isinstance(call, Call) or call.model is not model:
        return original(inputs, operation_fn=operation_fn, **kwargs)
    return call.run(inputs, operation_fn)


def parts(model: keras.Model) -> list["Part"]:
    """Lists the parts of a graph that scale separately, if there are some."""
    if not layers.is_graph(model):
        return []
    made = [Part(*part) for part in graphs.graph_parts(model)]
    return made if len(made) > 1 else []


class Part:
    """The operations of a graph that reach the same results.

    Tensors are found by the `id`s of their symbols.
    """

    def __init__(self, nodes: list, takes: list[int], gives: list[int]) -> None:
        self._nodes, self.takes, self.gives = nodes, takes, gives

    def run(self, operation_fn: Callable, taken: list) -> list:
        """Returns the part's results in float32, each with its own dtype.

        Args:
            operation_fn: Gives an operation its arguments.
            taken: Pairs of a tensor and its original dtype.
        """
        values = {
            key: _narrow(*pair)
            for key, pair in zip(self.takes, taken, strict=True)
        }
        for node in self._nodes:
            values.update(graphs.run_node(node, values, operation_fn))
        made = [values[key] for key in self.gives]
        return [
            (tensors.to_float32_with_notes(x), tensors.float_dtype(x))
            for x in made
        ]


def _narrow(tensor: Any, dtype: str) -> Any:
    if tensors.float_dtype(tensor) in ("", "sparse", dtype) or not dtype:
        return tensor
    narrow = tensors.input_copy(tensor, keras.ops.cast(tensor, dtype))
    tensors.copy_notes(tensor, narrow)
    return narrow
