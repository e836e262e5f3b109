"""Runs a graph with several results in parts, each with its own scaling.

A part holds the operations that reach the same results: the trunk is one part,
and each head another. Each head finds its own power of two, so gradients are
right even if losses differ by orders of magnitude. A part also ends at a result
that others are computed from, such as the mean beside a sample, so that
gradients with respect to it exist.
"""

from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import context_values, global_state, graphs, layers
from tfmix.gradient_scaling import model_call
from tfmix.ops import exact_values, tensors


class Results:
    """The results of the parts of one call: in float32, and unchanged."""

    def __init__(self, model: keras.Model, parts: list["Part"]) -> None:
        self.model, self._parts = model, parts
        self._pairs: list[tuple[Any, Any]] = []

    def wide(self, result: Any) -> Any:
        """Returns a result in float32, with what Keras attached to it."""
        for inside, outside in self._pairs:
            if inside is result:
                return outside
        return exact_values.to_float32_with_notes(result)

    def run(self, inputs: Any, operation_fn: Callable) -> Any:
        """Runs the parts, and returns the results in their own dtypes."""
        model, given = self.model, keras.tree.flatten(inputs)
        # Maps the `id` of a symbol to its value and original dtype. Other parts
        # get the value in float32.
        known = {
            id(symbol): (value, "")
            for symbol, value in zip(model.inputs, given, strict=True)
        }
        for part in self._parts:
            taken = [known[key] for key in part.takes]
            arguments = operation_fn, taken
            made = model_call.between_gates(model, part.run, arguments, {})
            known.update(zip(part.gives, made, strict=True))
        symbols = layers.results(model)
        made = [self._as_made(*known[id(symbol)]) for symbol in symbols]
        return graphs.packed_results(model, made)

    def _as_made(self, outside: Any, dtype: str) -> Any:
        """Returns a result of a part in its original dtype."""
        inside = _narrow(outside, dtype)
        self._pairs.append((inside, outside))
        return inside


def run_graph(
    model: keras.Model,
    original: Callable,
    inputs: Any,
    operation_fn: Callable = lambda operation: operation,
    **kwargs: Any,
) -> Any:
    """Runs the graph of a Functional model; `original` is Keras's method."""
    results = context_values.block.get().around
    # Only the outermost graph runs in parts.
    if not isinstance(results, Results) or results.model is not model:
        return original(inputs, operation_fn=operation_fn, **kwargs)
    return results.run(inputs, operation_fn)


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
            (exact_values.to_float32_with_notes(x), tensors.float_dtype(x))
            for x in made
        ]


def _narrow(tensor: Any, dtype: str) -> Any:
    if tensors.float_dtype(tensor) in ("", "sparse", dtype) or not dtype:
        return tensor
    narrow = keras.ops.cast(tensor, dtype)
    global_state.copy_notes(tensor, narrow)
    return narrow
