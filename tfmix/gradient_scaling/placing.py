"""Where the gradients of a model lie in float16's range.

Gradients that enter a model are brought to order one, times the model's place:
at first 1. Gradients that grow inside overflow; then the
optimizer halves its own place, and doubles it after many good steps. A model's
place is the lowest of the optimizers that update its variables.

In `fit` the optimizer that `compile` got is known before the step is traced,
and its place is read from its state. Elsewhere the model is called before it is
known who will update it. Under TensorFlow a variable of the model holds the
places of its optimizers. Under JAX a compiled step has no other state than what
it is given, so the optimizer's variables must be among its arguments; a
`keras.StatelessScope` around the model's call shows them.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import keras
import numpy as np
from keras import ops

from tfmix._keras import context_values, tracing
from tfmix._keras import variables as keras_variables
from tfmix.step import guard, replicas

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# A model has rarely more than two optimizers. Further ones share a number.
_MOST = 8
# As many bad batches may follow one another in a loop.
_BAD_BATCHES = 2
# No optimizer of the default rule has a higher place.
_HIGH = 2.0**24


class Mover(Protocol):
    """What decides where gradients lie: the state of an optimizer."""

    def place(self) -> Any:
        """Returns the place: a number or a float32 scalar tensor.

        It is `None` where JAX would make a constant of it.
        """


# What moves models, with the `id`s of the variables that it updates (JAX).
_movers: weakref.WeakKeyDictionary[Mover, set[int]] = (
    weakref.WeakKeyDictionary()
)
# The places that an optimizer has moved live as long as it does, since a
# compiled step writes them.
_moved: weakref.WeakKeyDictionary[Mover, set["_Place"]] = (
    weakref.WeakKeyDictionary()
)
# The places of models that were called outside of Keras's own step
# (TensorFlow).
_places: weakref.WeakKeyDictionary[keras.Model, "_Place"] = (
    weakref.WeakKeyDictionary()
)


def of(model: keras.Model) -> Any:
    """Returns the place of a model's gradients in this call.

    Returns:
        A number, or a float32 scalar tensor; a power of two under the default
        rule.
    """
    of_step, step = context_values.block.get().place_of_step, guard.around()
    if of_step is not None and not (step is not None and step.is_own):
        return of_step
    known = [] if of_step is None else [of_step]
    if _ON_TENSORFLOW:
        known += _of_variable(model)
    else:
        held = {id(variable) for variable in model.variables}
        places = [
            mover.place()
            for mover, variables in _movers.items()
            if not held.isdisjoint(variables)
        ]
        known += [place for place in places if place is not None]
    return functools.reduce(ops.minimum, known) if known else 1.0


def note(mover: Mover, variables: Iterable) -> None:
    """Notes which variables an optimizer updates."""
    _movers[mover] = {id(variable) for variable in variables}


def variables_of(updated: Sequence) -> list[keras.Variable]:
    """Lists the variables with the places of those models that own others.

    Args:
        updated: The variables that an optimizer updates.
    """
    return [place.variable for place in _of_owners(updated)]


def tell(mover: Mover, updated: Sequence, place: Any) -> None:
    """Tells models their place after a step of an optimizer (TensorFlow).

    Args:
        mover: The optimizer.
        updated: The variables that it updates, which belong to the models.
        place: Its place: a number or a float32 scalar tensor.
    """
    for each in _of_owners(updated):
        _moved.setdefault(mover, set()).add(each)
        each.put(mover, place)


def stays(is_data: Any, in_a_row: Any) -> Any:
    """Returns whether the place of gradients stays after a skipped step.

    A bad batch moves nothing. But clipping by a norm of one's own makes NaN of
    all gradients after an overflow, too, so further ones in a row do move it.

    Args:
        is_data: Bool or boolean scalar tensor, whether gradients are NaN.
        in_a_row: Integer or integer scalar tensor, the skipped steps before.
    """
    if is_data is False or context_values.block.get().in_fit:
        return is_data
    return ops.logical_and(is_data, in_a_row < _BAD_BATCHES)


def saved_with(model: keras.Model) -> list[keras.Variable]:
    """Lists what a SavedModel holds of a model's place."""
    return [_places[model].variable] if model in _places else []


def _of_owners(updated: Sequence) -> list["_Place"]:
    ids = {id(variable) for variable in updated} if _places else set()
    return [
        place
        for model, place in _places.items()
        if any(id(variable) in ids for variable in model.variables)
    ]


def _of_variable(model: keras.Model) -> list:
    """Returns the place that a model's variable holds, if there is one."""
    if model not in _places:
        if not keras_variables.can_be_made():
            return []

        def create() -> None:
            _places[model] = _Place()

        replicas.once_for_all(create)
    return _places[model].read()


class _Place:
    """The places that optimizers give a model, in one variable (TensorFlow).

    A step is often traced before its optimizers are known, so it reads the
    lowest number of a vector. All but the first are high until an optimizer
    uses them.
    """

    def __init__(self) -> None:
        self.variable = keras.Variable(
            np.array([1.0] + [_HIGH] * (_MOST - 1), "float32"),
            trainable=False,
            autocast=False,
            name="place",
        )
        self._next = itertools.count()
        # Maps an optimizer to its position and to its last place, `math.nan` if
        # that may be known on the device only.
        self._known: weakref.WeakKeyDictionary[Mover, tuple[int, float]] = (
            weakref.WeakKeyDictionary()
        )

    def read(self) -> list:
        """Returns the lowest place; nothing if no optimizer has put one in."""
        if tracing.trace() == tracing.EAGER:
            numbers = [number for _, number in self._known.values()]
            if not any(map(math.isnan, numbers)):
                return [min(numbers)] if numbers else []
        with replicas.one_replica([self.variable]):
            return [ops.min(keras_variables.read(self.variable))]

    def put(self, mover: Mover, place: Any) -> None:
        """Puts in the place of an optimizer."""
        position, before = self._known.get(mover, (next(self._next), 0.0))
        is_number = isinstance(place, float | np.floating)
        # After a compiled step its later ones are not seen here.
        now = float(place) if is_number and before == before else math.nan
        self._known[mover] = position, now
        if now != before:
            mine = np.arange(_MOST) == position % _MOST
            self.variable.assign(
                ops.where(mine, ops.cast(place, "float32"), self.variable)
            )
