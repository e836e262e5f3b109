"""Numbers leave a model as float32: the results of its outermost call."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from absl import logging

from tfmix._formats import SIXTEEN_BIT
from tfmix._keras import global_state, layers
from tfmix.policy.in_force import tensors

_PROBABILITIES = ("softmax", "sigmoid")
_as_made: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tfmix_outputs_as_made", default=False
)


@contextlib.contextmanager
def outputs_as_made() -> Iterator[None]:
    """Lets models return what their last layers make, for the doctor."""
    token = _as_made.set(True)
    try:
        yield
    finally:
        _as_made.reset(token)


def is_outermost(model: keras.Model) -> bool:
    """Says whether no layer called a model, and with real tensors."""
    return not _as_made.get() and global_state.is_outermost(model)


class Outputs:
    """What one model returns from its calls."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._told = False

    def of(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls; returns float32 if the call is the outermost, else as made."""
        outermost = is_outermost(self._model)
        with outputs_as_made():
            outputs = call(*args, **kwargs)
        if not outermost:
            return outputs
        self._tell_of_16_bit(outputs)
        return tensors.map_leaves(outputs, tensors.wide)

    def _tell_of_16_bit(self, outputs: Any) -> None:
        if self._told or not getattr(self._model, "compiled", False):
            return
        self._told = True
        dtypes: list[str] = []
        tensors.map_leaves(
            outputs, lambda one: dtypes.append(tensors.float_dtype(one))
        )
        narrow = {n: one for n, one in enumerate(dtypes) if one in SIXTEEN_BIT}
        if narrow:
            logging.warning(
                "%s %s of the model %s %s. %s",
                "Outputs" if len(narrow) > 1 else "Output",
                ", ".join(map(str, narrow)),
                "are" if len(narrow) > 1 else "is",
                " and ".join(sorted(set(narrow.values()))),
                _remedy(
                    [_activation(self._model, place) for place in narrow],
                    _otherwise(self._model),
                ),
            )


def _activation(model: keras.Model, place: int) -> str:
    """Names the activation that makes a result of a graph, "" if unknown."""
    results = layers.results(model)
    if place >= len(results):
        return ""
    made_by, _ = layers.maker(results[place])
    activation = getattr(made_by, "activation", None)
    return getattr(activation, "__name__", "")


def _otherwise(model: keras.Model) -> str:
    """Says what puts the last layer of a model made already into float32."""
    if not layers.results(model):
        return ""
    call = f"`tfmix.apply_policy(model, {model.dtype_policy.name!r})`"
    return f", or write {call} for one that is made already"


def _remedy(activations: Sequence[str], otherwise: str) -> str:
    """Says what 16-bit outputs cost, and what to write."""
    cost = "The last rounding reaches the loss"
    heads = [name if name in _PROBABILITIES else "" for name in activations]
    if any(heads):
        cost += ", and probabilities below the format's range become 0"
    if len(set(heads)) > 1:
        layers_of = [f"`tfmix.float32_output({h!r})`" for h in heads]
        each = ", ".join(layers_of).replace("''", "")
        return (
            f"{cost}. End each output in a layer of its own: {each}{otherwise}."
        )
    if any(heads):
        return (
            f"{cost}. End the model with `tfmix.float32_output({heads[0]!r})`, "
            f"behind a last layer without `activation={heads[0]!r}`{otherwise}."
        )
    return f"{cost}. End the model with `tfmix.float32_output()`{otherwise}."
