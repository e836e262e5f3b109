"""Numbers leave a model as float32: the results of its outermost call."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import global_state, layers, model_methods
from tfmix.autocast import own_code
from tfmix.gradient_scaling import heads, model_call, tensors
from tfmix.loss_scaling import train_step_guard

# Losses that go back to the logits behind these, whatever the dtype of the
# probabilities.
_THROUGH: dict[str, tuple[str, ...]] = {
    "softmax": ("categorical_crossentropy", "sparse_categorical_crossentropy"),
    "sigmoid": ("binary_crossentropy",),
}
_HOLDS = {"float16": "3 digits, up to 65504", "bfloat16": "2 digits"}


def outputs_as_made() -> contextlib.AbstractContextManager[None]:
    """Lets models return what their last layers make, for the doctor."""
    return model_call.inside(model_call.AS_MADE)


def is_outermost(model: keras.Model) -> bool:
    """Returns whether a model's results leave what computes in 16 bit.

    With real tensors, and called by no layer but a graph that only passes on.
    """
    if model_call.around() is not None or global_state.on_shapes_only():
        return False
    entry = global_state.entry_layer()
    if entry is None or entry is model:
        return True
    return layers.is_structure(entry) and not model_methods.by_role(entry)


class Outputs:
    """What one model returns from its calls."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.graph = heads.Graph(model)
        self._told = False
        # What the model computes by: the same in each call.
        self._call: Callable[..., Any] = model.call

    @functools.cached_property
    def has_parts(self) -> bool:
        """Returns whether the model is a graph whose parts have own borders."""
        several = len(layers.results(self._model)) > 1
        return several and self.graph.has_parts

    def of(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls; returns float32 if the call is the outermost, else as made."""
        if not is_outermost(self._model):
            with outputs_as_made():
                return call(*args, **kwargs)
        self._call = call
        if self.has_parts:
            # Each has a border.
            return self._kept_finite(*args, **kwargs)
        compute = self._kept_finite
        return model_call.call_inside(
            self._model, compute, args, kwargs, self._is_float16()
        )

    def _is_float16(self) -> bool:
        return own_code.computes_in(self._model, "float16")

    def _kept_finite(self, *args: Any, **kwargs: Any) -> Any:
        compute = self._in_float32
        return train_step_guard.kept_finite(
            self._model, compute, *args, **kwargs
        )

    def _in_float32(self, *args: Any, **kwargs: Any) -> Any:
        inside: Any = model_call.AS_MADE
        wide: Callable[[Any], Any] = tensors.wide
        if self.has_parts:
            inside = heads.Results(self._model, self._is_float16())
            wide = inside.wide
        with model_call.inside(inside):
            outputs = self._call(*args, **kwargs)
        self._tell_of_16_bit(outputs)
        return tensors.map_leaves(outputs, wide)

    def _tell_of_16_bit(self, outputs: Any) -> None:
        if self._told or not getattr(self._model, "compiled", False):
            return
        self._told = True
        # In Keras's order, which for a dict is that of its sorted keys.
        leaves = keras.tree.flatten_with_path(outputs)
        if not any(tensors.is_16_bit(leaf) for _, leaf in leaves):
            return
        try:
            losses = layers.losses(self._model, outputs)
        except (KeyError, ValueError):
            # Of losses that do not fit, which Keras says better.
            return
        narrow = [
            place
            for place, (path, leaf) in enumerate(leaves)
            if tensors.is_16_bit(leaf)
            and not is_undone(_last_layer(self._model, place), losses.get(path))
        ]
        if narrow:
            _, leaf = leaves[narrow[0]]
            dtype = tensors.float_dtype(leaf)
            # Once in a process: a package may make many models, whose layers
            # its user cannot change.
            line = _line(self._model, narrow, dtype)
            _messages.warn_once(line, about=("last layer", dtype))


def _last_layer(model: keras.Model, place: int) -> keras.Layer | None:
    """Returns the layer that makes a graph's result, if it is known."""
    results = layers.results(model)
    made_by = layers.maker(results[place])[0] if place < len(results) else None
    return made_by if isinstance(made_by, keras.Layer) else None


def is_undone(layer: keras.Layer | None, loss: Any) -> bool:
    """Returns whether a loss does not see the last rounding of probabilities."""
    activation = getattr(getattr(layer, "activation", None), "__name__", "")
    function = getattr(getattr(loss, "fn", None), "__name__", "")
    from_logits = getattr(loss, "from_logits", False)
    return function in _THROUGH.get(activation, ()) and not from_logits


def _line(model: keras.Model, narrow: list[int], dtype: str) -> str:
    """Says which layer returns 16 bit, what that holds, and what to write."""
    dtype = f"{dtype} ({_HOLDS[dtype]})"
    made_by = [_last_layer(model, place) for place in narrow]
    names = [repr(layer.name) for layer in made_by if layer is not None]
    if len(names) < len(narrow):
        what = f"the output of {model.name!r} is {dtype}; make what returns it"
    elif len(names) == 1:
        what = f"last layer {names[0]} is {dtype}; make it"
    else:
        what = f"last layers {', '.join(names)} are {dtype}; make them"
    return f'{what} `dtype="float32"`'
