"""Calls a model, whose outermost call returns float32.

`Calls.run` reads downwards: it keeps statistics finite, then come the gates,
which scale gradients inside, then the policy's rules, then the model's own
`call`.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import context_values, global_state, layers, replacing
from tfmix.gradient_scaling import heads, model_call
from tfmix.ops import tensors
from tfmix.step import guard

# What a model call is part of, while its results stay in their own dtype.
_AS_MADE = "as made"


def outputs_as_made() -> contextlib.AbstractContextManager[None]:
    """Makes models return their last layers' results unchanged, for `check`."""
    return context_values.holding(around=_AS_MADE)


def is_outermost(model: keras.Model) -> bool:
    """Returns whether a model's results leave the 16-bit layers.

    The call must have real tensors, and come from no layer except a graph that
    only connects layers.
    """
    is_part = context_values.block.get().around is not None
    if is_part or global_state.on_shapes_only():
        return False
    entry = global_state.entry_layer()
    if entry is None or entry is model:
        return True
    return layers.is_structure(entry) and not replacing.by_role(entry)


class Calls:
    """The calls of one model.

    Args:
        model: The model.
        ruled: Returns a context in which the model's rules hold.
    """

    def __init__(self, model: keras.Model, ruled: Callable) -> None:
        self._model, self._ruled = model, ruled

    @functools.cached_property
    def parts(self) -> list[heads.Part]:
        """The parts of a graph that scale separately."""
        several = len(layers.results(self._model)) > 1
        return heads.parts(self._model) if several else []

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

    def _in_float32(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model under its rules. Its results are float32."""
        parts = heads.Call(self._model, self.parts) if self.parts else None
        with context_values.holding(around=parts or _AS_MADE), self._ruled():
            outputs = self._own(*args, **kwargs)
            # Under the rules, a cast returns the value from before rounding.
            wide = tensors.to_float32_with_notes
            return tensors.map_leaves(outputs, wide)

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        call = replacing.wrapped(self._model, "call", replacing.RULES)
        return call(*args, **kwargs)
