"""Returns float32 from the outermost call of a model."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import global_state, layer_methods, layers
from tfmix.gradient_scaling import heads, model_call
from tfmix.ops import tensors
from tfmix.policy import layer_dtypes
from tfmix.step import guard

_HOLDS = {"float16": "3 digits, up to 65504", "bfloat16": "2 digits"}


def outputs_as_made() -> contextlib.AbstractContextManager[None]:
    """Makes models return their last layers' results unchanged, for `check`."""
    return model_call.inside(model_call.AS_MADE)


def is_outermost(model: keras.Model) -> bool:
    """Returns whether a model's results leave the 16-bit layers.

    The call must have real tensors, and come from no layer except a graph that
    only connects layers.
    """
    if model_call.around() is not None or global_state.on_shapes_only():
        return False
    entry = global_state.entry_layer()
    if entry is None or entry is model:
        return True
    return layers.is_structure(entry) and not layer_methods.by_role(entry)


class Outputs:
    """The results of one model's calls.

    Args:
        model: The model.
        under_rules: Calls a function with arguments under the model's rules.
    """

    def __init__(self, model: keras.Model, under_rules: Callable) -> None:
        self._model, self._under_rules = model, under_rules
        self._told = False

    @functools.cached_property
    def parts(self) -> list[heads.Part]:
        """The parts of a graph that scale separately."""
        several = len(layers.results(self._model)) > 1
        return heads.parts(self._model) if several else []

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. Its outermost call returns float32."""
        if not is_outermost(self._model):
            with outputs_as_made():
                return self._under_rules(self._own_call(), *args, **kwargs)
        if self.parts:
            # Each part scales its own gradients.
            return self._kept_finite(*args, **kwargs)
        compute = self._kept_finite
        return model_call.call_inside(
            self._model, compute, args, kwargs, self._is_float16()
        )

    def _is_float16(self) -> bool:
        return layer_dtypes.computes_in(self._model, "float16")

    def _kept_finite(self, *args: Any, **kwargs: Any) -> Any:
        compute = self._in_float32
        return guard.kept_finite(self._model, compute, *args, **kwargs)

    def _in_float32(self, *args: Any, **kwargs: Any) -> Any:
        inside: Any = model_call.AS_MADE
        wide: Callable[[Any], Any] = tensors.wide
        if self.parts:
            is_float16 = self._is_float16()
            inside = heads.Results(self._model, self.parts, is_float16)
            wide = inside.wide

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = self._own_call()(*args, **kwargs)
            self._tell_of_16_bit(outputs)
            # Under the rules, a cast returns the value from before rounding.
            return tensors.map_leaves(outputs, wide)

        with model_call.inside(inside):
            return self._under_rules(call, *args, **kwargs)

    def _own_call(self) -> Callable:
        rules = layer_methods.RULES
        return layer_methods.wrapped(self._model, "call", rules)

    def _tell_of_16_bit(self, outputs: Any) -> None:
        if self._told or not getattr(self._model, "compiled", False):
            return
        self._told = True
        # This is Keras's order, by sorted keys for a dict.
        leaves = keras.tree.flatten_with_path(outputs)
        narrow = [
            place
            for place, (_, leaf) in enumerate(leaves)
            if tensors.is_16_bit(leaf)
        ]
        if narrow:
            _, leaf = leaves[narrow[0]]
            dtype = tensors.float_dtype(leaf)
            # It is reported once per process: a package may create many models,
            # whose layers its user cannot change.
            line = _line(self._model, narrow, dtype)
            _messages.warn_once(line, about=("last layer", dtype))


def _last_layer(model: keras.Model, place: int) -> keras.Layer | None:
    """Returns the layer that computes a graph's result, if it is known."""
    results = layers.results(model)
    made_by = layers.maker(results[place])[0] if place < len(results) else None
    return made_by if isinstance(made_by, keras.Layer) else None


def _line(model: keras.Model, narrow: list[int], dtype: str) -> str:
    """Describes the layer that returns 16 bit, and says what to write."""
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
