"""Results that other results are made of, in float32 and with their gradients.

The mean that an encoder returns beside a sample drawn from it, the feature maps
beside a prediction, by which Grad-CAM asks for its gradient: of a float32 copy
nothing else is made. So what follows is computed from the float32 tensor.
"""

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _context_values
from tfmix._keras import global_state, layers
from tfmix.in_force.process_wide import tensors

if keras.backend.backend() == "tensorflow":
    from tfmix.scaling.border import tensorflow_border

_run: contextvars.ContextVar["Run | None"] = contextvars.ContextVar(
    "tfmix_inner_results", default=None
)


class Run:
    """One run of a model, and its results that others were made of."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # What is inside the model, by what it goes out as.
        self._pairs: list[tuple[Any, Any]] = []

    def going_on(self) -> contextlib.AbstractContextManager[None]:
        """Lets the model's graph see what it runs through, in a block."""
        return _context_values.set_to(_run, self)

    def wide(self, result: Any) -> Any:
        """Returns a result in float32, with what Keras attached to it."""
        for inside, outside in self._pairs:
            if inside is result:
                return outside
        return tensors.wide(result)

    def split(self, tensor: Any) -> Any:
        """Returns what follows is to be computed from, of the same dtype."""
        dtype = tensors.float_dtype(tensor)
        if dtype in ("", "sparse"):
            return tensor
        wide = tensors.wide(tensor)
        outside = _with_notes_of(wide, tensorflow_border.cut(wide))
        if outside is tensor:
            return tensor
        inside = _with_notes_of(tensor, keras.ops.cast(outside, dtype))
        self._pairs.append((inside, outside))
        return inside


def through_graph(
    model: keras.Model, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Runs the graph of a Functional model; `original` is Keras's method."""
    run = _run.get()
    if run is None or run._model is not model:
        return original(*args, **kwargs)
    places = layers.results_computed_from(model)
    symbols = {id(layers.results(model)[place]) for place in places}

    def seen(symbol: keras.KerasTensor, tensor: Any) -> Any:
        return run.split(tensor) if id(symbol) in symbols else tensor

    return layers.run_graph(model, original, seen, *args, **kwargs)


def _with_notes_of(tensor: Any, other: Any) -> Any:
    if other is not tensor:
        for name in global_state.NOTES_OF_KERAS:
            value = global_state.note(tensor, name)
            if value is not None:
                global_state.put_note(other, name, value)
    return other
