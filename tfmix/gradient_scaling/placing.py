"""Where the gradients of a model lie in float16's range.

Gradients that enter a model are brought to the model's place, the lowest of the
optimizers that update its variables. An optimizer first uses all the room that
float16 has, for gradients that shrink inside, such as those of a mean.
Gradients that grow inside overflow; then it falls back to order one, halves its
place at each further overflow, and doubles it after many good steps. Where no
optimizer can lower the place, it is 1.

In `fit` the optimizer that `compile` got is known before the step is traced,
and its place is read from its state. Elsewhere the model is called before it is
known who will update it. Under TensorFlow a variable of the model holds its
place, which each step of an optimizer lowers or raises. Under JAX a compiled
step has no other state than what it is given, so the optimizer's variables must
be among its arguments; a `keras.StatelessScope` around the model's call shows
them.
"""

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import keras
from keras import ops

from tfmix._keras import context
from tfmix._keras import variables as keras_variables
from tfmix.step import guard, replicas

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# The place of a model that no optimizer has moved, above all others.
_NOBODYS = 2.0**126
# An optimizer's place, until gradients overflow inside.
FREE = 2.0**15
# As many bad batches may follow one another in a loop.
_BAD_BATCHES = 2


class Mover(Protocol):
    """What decides where gradients lie: the state of an optimizer.

    Attributes:
        places: The variables of models that it moves, by their `id`s. They live
            as long as it does, since a compiled step writes them.
    """

    places: dict[int, keras.Variable]

    def place(self) -> Any:
        """Returns the place: a number or a float32 scalar tensor.

        It is `None` where JAX would make a constant of it.
        """


# What moves models, with the `id`s of the variables that it updates (JAX).
_movers: weakref.WeakKeyDictionary[Mover, set[int]] = (
    weakref.WeakKeyDictionary()
)
# Those of models that were called outside of Keras's own step (TensorFlow).
_places: weakref.WeakKeyDictionary[keras.Model, keras.Variable] = (
    weakref.WeakKeyDictionary()
)


def of(model: keras.Model) -> Any:
    """Returns the place of a model's gradients in this call.

    Returns:
        A number, or a float32 scalar tensor; a power of two under the default
        rule.
    """
    step = guard.current_step()
    of_step = None if step is None else step.place
    if step is not None and of_step is not None and not step.is_own:
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
    ids = {id(variable) for variable in updated} if _places else set()
    return [
        place
        for model, place in _places.items()
        if any(id(variable) in ids for variable in model.variables)
    ]


def tell(mover: Mover, updated: Sequence, before: Any, after: Any) -> None:
    """Tells models their place after a step of an optimizer (TensorFlow).

    A place below the optimizer's own is that of another one, and stays unless
    this one asks for less. If two have the same and one raises its own, the
    next step of the other lowers the model's again.

    Args:
        mover: The optimizer.
        updated: The variables that it updates, which belong to the models.
        before: Its place before the step: a number or a float32 scalar tensor.
        after: The same after it.
    """
    for variable in variables_of(updated):
        mover.places[id(variable)] = variable
        now = keras_variables.reader()(variable)
        lower = keras_variables.select(after < now, after, now)
        new = keras_variables.select(now < before, lower, after)
        keras_variables.assign_new(variable, now, new)


def stays(is_data: Any, in_a_row: Any) -> Any:
    """Returns whether the place of gradients stays after a skipped step.

    A bad batch moves nothing. But clipping by a norm of one's own makes NaN of
    all gradients after an overflow, too, so further ones in a row do move it.

    Args:
        is_data: Bool or boolean scalar tensor, whether gradients are NaN.
        in_a_row: Integer or integer scalar tensor, the skipped steps before.
    """
    if is_data is False or context.block.get().step is not None:
        return is_data
    return ops.logical_and(is_data, in_a_row < _BAD_BATCHES)


def saved_with(model: keras.Model) -> list[keras.Variable]:
    """Lists what a SavedModel holds of a model's place."""
    return [_places[model]] if model in _places else []


def _of_variable(model: keras.Model) -> list:
    """Returns the place that a model's variable holds, if there is one."""
    if model not in _places:
        if not keras_variables.can_be_made():
            return []

        def create() -> None:
            _places[model] = keras.Variable(
                _NOBODYS,
                dtype="float32",
                trainable=False,
                autocast=False,
                name="place",
            )

        replicas.once_for_all(create)
    with replicas.one_replica([_places[model]]):
        place = keras_variables.reader()(_places[model])
        return [keras_variables.select(place < _NOBODYS, place, 1.0)]
