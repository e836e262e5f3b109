"""Numbers leave a model as float32: the results of its outermost call."""

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from absl import logging

from tfmix._formats import SIXTEEN_BIT
from tfmix._keras import global_state, layers, model_methods
from tfmix.policy.in_force import model_border, tensors

_PROBABILITIES = ("softmax", "sigmoid")
_COST = "The last rounding reaches the loss"
_COST_OF_PROBABILITIES = (
    "Probabilities below the format's range become 0 in `predict`, in metrics "
    "and in losses"
)
if keras.backend.backend() == "tensorflow":
    # Which note the logits on the result of a softmax or sigmoid.
    _COST_OF_PROBABILITIES += (
        " (not in Keras's cross-entropies, which go back to the logits)"
    )
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
    """Says whether a model's results leave what computes in 16 bit.

    With real tensors, and called by no layer but a graph that only passes on.
    """
    if _as_made.get() or global_state.on_shapes_only():
        return False
    entry = global_state.entry_layer()
    if entry is None or entry is model:
        return True
    return layers.is_structure(entry) and not model_methods.parts(entry)


class Outputs:
    """What one model returns from its calls."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._told = False

    def of(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls; returns float32 if the call is the outermost, else as made."""
        if not is_outermost(self._model):
            with outputs_as_made():
                return call(*args, **kwargs)
        in_float32 = functools.partial(self._in_float32, call)
        return model_border.call_inside(self._model, in_float32, args, kwargs)

    def _in_float32(self, call: Callable, *args: Any, **kwargs: Any) -> Any:
        with outputs_as_made():
            outputs = call(*args, **kwargs)
        self._tell_of_16_bit(outputs)
        # A copy of one that others are made of would have no gradient of them.
        as_made = layers.results_computed_from(self._model)
        places = itertools.count()
        return tensors.map_leaves(
            outputs, lambda x: x if next(places) in as_made else tensors.wide(x)
        )

    def _tell_of_16_bit(self, outputs: Any) -> None:
        if self._told or not getattr(self._model, "compiled", False):
            return
        self._told = True
        dtypes: list[str] = []
        tensors.map_leaves(
            outputs, lambda one: dtypes.append(tensors.float_dtype(one))
        )
        names = _names(self._model, len(dtypes))
        narrow = [n for n, one in enumerate(dtypes) if one in SIXTEEN_BIT]
        if narrow:
            heads = {names[n]: _activation(self._model, n) for n in narrow}
            logging.warning(
                "%s %s of the model %s %s. %s%s.",
                "Outputs" if len(narrow) > 1 else "Output",
                ", ".join(heads),
                "are" if len(narrow) > 1 else "is",
                " and ".join(sorted({dtypes[n] for n in narrow})),
                _remedy(heads),
                _otherwise(self._model),
            )


def _names(model: keras.Model, count: int) -> list[str]:
    """Returns the outputs' names as Keras's losses know them, or places."""
    known = getattr(model, "output_names", None) or []
    if len(known) != count:
        return [*map(str, range(count))]
    return [*map(repr, known)]


def _activation(model: keras.Model, place: int) -> str:
    """Names the activation that makes probabilities of a graph's result."""
    results = layers.results(model)
    if place >= len(results):
        return ""
    made_by, _ = layers.maker(results[place])
    activation = getattr(made_by, "activation", None)
    name = getattr(activation, "__name__", "")
    return name if name in _PROBABILITIES else ""


def _otherwise(model: keras.Model) -> str:
    """Says what puts the last layer of a model made already into float32."""
    if not layers.results(model):
        return ""
    call = f"`tfmix.apply_policy(model, {model.dtype_policy.name!r})`"
    return f", or write {call} for one that is made already"


def _remedy(heads: Mapping[str, str]) -> str:
    """Says what 16-bit outputs cost, and what to write, by their activation."""
    chosen = sorted({*heads.values()} - {""})
    given = f"activation={chosen[0]!r}, " if len(chosen) == 1 else ""
    calls = {
        name: f"`tfmix.float32_output({repr(head) if head else ''})`"
        for name, head in heads.items()
    }
    if len(set(calls.values())) == 1:
        ending = f"end the model with {next(iter(calls.values()))}"
    else:
        each = (f"{name} with {call}" for name, call in calls.items())
        ending = f"end {', '.join(each)}"
    bare = " and ".join(f"`activation={each!r}`" for each in chosen)
    behind = f", behind a last layer without {bare}" if chosen else ""
    return (
        f"{_COST_OF_PROBABILITIES if chosen else _COST}. Give the last layer "
        f'`dtype="float32"`, as in `Dense(..., {given}dtype="float32")`; or, '
        f"to multiply in 16 bit, {ending}{behind}"
    )
