"""Returns float32 from the outermost call of a model."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import global_state, layers, replacing
from tfmix.gradient_scaling import heads, model_call
from tfmix.ops import exact_values, tensors
from tfmix.step import guard


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
    return layers.is_structure(entry) and not replacing.by_role(entry)


class Outputs:
    """The results of one model's calls.

    Args:
        model: The model.
        under_rules: Calls a function with arguments under the model's rules.
    """

    def __init__(self, model: keras.Model, under_rules: Callable) -> None:
        self._model, self._under_rules = model, under_rules

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
        return layers.computes_in(self._model, "float16")

    def _kept_finite(self, *args: Any, **kwargs: Any) -> Any:
        compute = self._in_float32
        return guard.kept_finite(self._model, compute, *args, **kwargs)

    def _in_float32(self, *args: Any, **kwargs: Any) -> Any:
        inside: Any = model_call.AS_MADE
        wide: Callable[[Any], Any] = exact_values.to_float32_with_notes
        if self.parts:
            is_float16 = self._is_float16()
            inside = heads.Results(self._model, self.parts, is_float16)
            wide = inside.wide

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = self._own_call()(*args, **kwargs)
            # Under the rules, a cast returns the value from before rounding.
            return tensors.map_leaves(outputs, wide)

        with model_call.inside(inside):
            return self._under_rules(call, *args, **kwargs)

    def _own_call(self) -> Callable:
        rules = replacing.RULES
        return replacing.wrapped(self._model, "call", rules)
