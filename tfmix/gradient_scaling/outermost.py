"""Calls a model, whose outermost call returns float32.

`Calls.run` reads downwards: it keeps statistics finite, then come the gates,
which scale gradients inside, then the policy's rules, then the model's own
`call`.

A graph with several results runs in parts, each with gates of its own. A part
holds the operations that reach the same results: the trunk is one part, and
each head another. Each head finds its own power of two, so gradients are right
even if losses differ by orders of magnitude. A part also ends at a result that
others are computed from, such as the mean beside a sample, so that gradients
with respect to it exist.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import context, graphs, layers
from tfmix.gradient_scaling import model_call
from tfmix.ops import tensors
from tfmix.step import guard

# What a model call is part of, while its results stay in their own dtype.
_AS_MADE = "as made"


def outputs_as_made() -> contextlib.AbstractContextManager[None]:
    """Makes models return their last layers' results unchanged, for `check`."""
    return context.holding(around=_AS_MADE)


def is_outermost(model: keras.Model) -> bool:
    """Returns whether a model's results leave the 16-bit layers.

    The call must have real tensors, and come from no layer except a graph that
    only connects layers.
    """
    is_part = context.block.get().around is not None
    if is_part or context.on_shapes_only():
        return False
    entry = context.entry_layer()
    if entry is None or entry is model:
        return True
    return layers.is_structure(entry) and not layers.by_role(entry)


class Calls:
    """The calls of one model.

    Args:
        model: The model.
        ruled: Returns a context in which the model's rules hold.
    """

    def __init__(self, model: keras.Model, ruled: Callable) -> None:
        self._model, self._ruled = model, ruled

    @functools.cached_property
    def parts(self) -> list[keras.Function]:
        """The parts of a graph that scale separately, if there are some."""
        model = self._model
        if not layers.is_graph(model) or len(layers.results(model)) == 1:
            return []
        made = graphs.parts(model)
        return made if len(made) > 1 else []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. Its outermost call returns float32."""
        model = self._model
        if not is_outermost(model):
            with outputs_as_made(), self._ruled():
                return self._own(*args, **kwargs)
        with guard.statistics_kept_finite(model, kwargs.get("training")):
            if self.parts:
                # Each part has gates of its own.
                return self._in_float32(*args, **kwargs)
            return model_call.between_gates(
                model, self._in_float32, args, kwargs
            )

    def run_graph(
        self,
        original: Callable,
        inputs: Any,
        operation_fn: Callable = lambda operation: operation,
        **kwargs: Any,
    ) -> Any:
        """Runs the graph in parts; `original` is Keras's method."""
        # Only the outermost graph does.
        if context.block.get().around is not self:
            return original(inputs, operation_fn=operation_fn, **kwargs)
        model, given = self._model, keras.tree.flatten(inputs)
        # Maps the `id` of a symbol to its value and original dtype. Other parts
        # get the value in float32.
        known = {
            id(symbol): (value, "")
            for symbol, value in zip(model.inputs, given, strict=True)
        }
        for part in self.parts:
            taken = [known[id(symbol)] for symbol in part.inputs]
            run, arguments = functools.partial(_run_part, part), (taken,)
            kwargs = {"operation_fn": operation_fn}
            made = model_call.between_gates(model, run, arguments, kwargs)
            known.update(zip(map(id, part.outputs), made, strict=True))
        made = [_narrow(*known[id(symbol)]) for symbol in layers.results(model)]
        return graphs.packed_results(model, made)

    def _in_float32(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model under its rules. Its results are float32."""
        around = self if self.parts else _AS_MADE
        with context.holding(around=around), self._ruled():
            outputs = self._own(*args, **kwargs)
            # Under the rules, a cast returns the value from before rounding.
            wide = tensors.to_float32_with_notes
            return tensors.map_leaves(outputs, wide)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        call = layers.wrapped(self._model, "call", layers.RULES)
        return call(*args, **kwargs)


def _run_part(part: keras.Function, taken: list, operation_fn: Callable) -> Any:
    """Returns a part's results in float32, each with its own dtype.

    Args:
        part: The part.
        taken: Pairs of a tensor and its original dtype.
        operation_fn: Gives an operation its arguments.
    """
    given = [_narrow(*pair) for pair in taken]
    return [
        (tensors.to_float32_with_notes(x), tensors.float_dtype(x))
        for x in graphs.run_part(part, given, operation_fn)
    ]


def _narrow(tensor: Any, dtype: str) -> Any:
    if tensors.float_dtype(tensor) in ("", "sparse", dtype) or not dtype:
        return tensor
    narrow = tensors.input_copy(tensor, keras.ops.cast(tensor, dtype))
    tensors.copy_notes(tensor, narrow)
    return narrow
