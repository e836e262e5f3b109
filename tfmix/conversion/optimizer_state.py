"""Hands the state of a model's optimizer over when its variables are cast.

An optimizer with 16-bit variables keeps moments of its masters, one without
of the variables themselves; a conversion, there or back, goes on with what
was there. Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from absl import logging
from keras import ops

from tfmix._keras import optimizers
from tfmix.variables import base, flat

# Lists of the model's and of all variables, not of one slot of each.
_NO_SLOTS = ("_trainable_variables", "_variables")


@dataclasses.dataclass(frozen=True)
class Handover:
    """What an optimizer knew, by the model's variables.

    Attributes:
        kind: Class of the optimizer that makes the updates.
        variables: The model's variables it was built with.
        dtypes: Their dtypes by then.
        slots: For each slot's name one array per variable.
        numbers: Counters, rates and the like, by name.
        weights: The variables' values in float32, from masters if there are.
    """

    kind: type
    variables: list[Any]
    dtypes: list[str]
    slots: dict[str, list[np.ndarray]]
    numbers: dict[str, np.ndarray]
    weights: list[np.ndarray]

    @property
    def cast(self) -> bool:
        """Whether a variable has another dtype now."""
        return [v.dtype for v in self.variables] != self.dtypes


def take(model: Any) -> Handover | None:
    """Notes the state of a model's optimizer; before variables are cast.

    Args:
        model: A Keras model, compiled or not.

    Returns:
        The state, `None` if there is none to hand over.
    """
    chain = _chain(model)
    if not chain or not all(one.built for one in chain):
        return None
    variables = list(chain[0]._trainable_variables)
    places = _places(chain, variables)
    if places is None:
        return None
    worker = chain[-1]
    slots = {
        name: [place.read(ops.convert_to_numpy, found) for place in places]
        for name, found in _slots(worker).items()
    }
    numbers = {
        name: ops.convert_to_numpy(one)
        for name, one in vars(worker).items()
        if isinstance(one, keras.Variable) and not len(one.shape)
    }
    owner = _owner(chain)
    weights = [
        ops.convert_to_numpy(
            ops.cast(v, "float32") if owner is None else owner.read_float32(v)
        )
        for v in variables
    ]
    dtypes = [v.dtype for v in variables]
    return Handover(type(worker), variables, dtypes, slots, numbers, weights)


def give(model: Any, state: Handover | None) -> None:
    """Goes on with a state in the model's optimizer; after the cast.

    Args:
        model: A Keras model.
        state: What `take` returned.
    """
    chain = _chain(model)
    if state is None or not chain:
        return
    for optimizer in chain:
        _know_again(optimizer)
    with _scope(model):
        chain[0].build(state.variables)
    places = _places(chain, state.variables)
    if places is None or type(chain[-1]) is not state.kind:
        logging.warning(
            "tfmix: %s cannot go on with the state of %s; its moments and its "
            "count of steps start anew.",
            type(chain[-1]).__name__,
            state.kind.__name__,
        )
    else:
        _write(chain[-1], places, state)
    owner = _owner(chain)
    for variable, weight in zip(state.variables, state.weights, strict=True):
        if owner is not None:
            owner.assign_float32(variable, weight)
        else:
            variable.assign(ops.cast(weight, variable.dtype))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the slots of one of the model's variables lie."""

    index: int  # among the variables of the optimizer that updates
    group: flat.Group | None = None  # whose vector holds it
    position: int = 0  # in that vector

    def read(self, convert: Any, found: list[Any]) -> np.ndarray:
        value = convert(found[self.index])
        if self.group is None:
            return np.asarray(value)
        return np.asarray(convert(self.group.parts(value)[self.position]))


def _write(worker: Any, places: list[_Place], state: Handover) -> None:
    for name, found in _slots(worker).items():
        pieces: dict[int, list[np.ndarray]] = {}
        for place, value in zip(places, state.slots.get(name, []), strict=True):
            pieces.setdefault(place.index, []).append(value)
        for index, values in pieces.items():
            joined = np.concatenate([np.ravel(value) for value in values])
            found[index].assign(np.reshape(joined, found[index].shape))
    for name, value in state.numbers.items():
        if isinstance(vars(worker).get(name), keras.Variable):
            vars(worker)[name].assign(value)


def _chain(model: Any) -> list[Any]:
    """The model's optimizer and those inside it, outermost first."""
    if not getattr(model, "compiled", False):
        return []
    return list(optimizers.chain(getattr(model, "optimizer", None)))


def _owner(chain: list[Any]) -> base.SixteenBitOptimizer | None:
    for optimizer in chain:
        if isinstance(optimizer, base.SixteenBitOptimizer):
            return optimizer
    return None


def _places(chain: list[Any], variables: list[Any]) -> list[_Place] | None:
    """Says where each variable's slots lie, `None` where that is unknown."""
    known = getattr(chain[-1], "_trainable_variables", None)
    if known is None:
        return None
    index = {id(variable): place for place, variable in enumerate(known)}
    owner = _owner(chain)
    places = []
    for variable in variables:
        target, group = variable, None
        if owner is not None:
            target = owner._store.target(variable)
            groups = getattr(owner._store, "_group_of", {})
            group = groups.get(id(variable))
        if id(target) not in index:
            return None
        position = 0 if group is None else group.position(variable)
        places.append(_Place(index[id(target)], group, position))
    return places


def _slots(worker: Any) -> dict[str, list[Any]]:
    count = len(worker._trainable_variables)
    return {
        name: found
        for name, found in vars(worker).items()
        if isinstance(found, list)
        and name not in _NO_SLOTS
        and len(found) == count
        and all(isinstance(one, keras.Variable) for one in found)
    }


def _know_again(optimizer: Any) -> None:
    """Lets a built optimizer know variables whose storage is another now.

    TensorFlow's knows them by the `tf.Variable` inside, which a cast replaces.
    """
    if not optimizer.built or not hasattr(optimizer, "_var_key"):
        return
    known = optimizer._trainable_variables
    indices = optimizer._trainable_variables_indices
    indices.clear()
    for place, variable in enumerate(known):
        indices[optimizer._var_key(variable)] = place


@contextlib.contextmanager
def _scope(model: Any) -> Iterator[None]:
    """Creates variables where the model's are: in its strategy's scope."""
    strategy = getattr(model, "distribute_strategy", None)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        yield
