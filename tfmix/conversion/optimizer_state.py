"""The state of a model's optimizer, handed over when its variables are cast.

With 16-bit variables the moments are those of masters, else of the variables
themselves; a conversion, there or back, goes on with what was there.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _messages
from tfmix._keras import optimizers, slots_by_variable
from tfmix._keras import variables as variables_of
from tfmix.optimizers import sixteen_bit_optimizer

# Which of the optimizers that update, its attribute, which model variable.
Key = tuple[int, str, int]
# In place of the last, for what an optimizer keeps once: counters, rates.
_ONCE = -1


@dataclasses.dataclass(frozen=True)
class Handover:
    """What an optimizer knew, by the model's variables."""

    workers: list[keras.optimizers.Optimizer]  # that make the updates
    variables: list[keras.Variable]  # the model's, they were built for
    targets: list[keras.Variable]  # what is updated: masters, or these
    dtypes: list[str]  # of the variables by then
    # Slots and counters, `None` if it is not certain whose they are.
    numbers: dict[Key, np.ndarray] | None
    weights: list[np.ndarray]  # in float32, from masters if there are

    @property
    def cast(self) -> bool:
        """Whether a variable has another dtype now."""
        return [v.dtype for v in self.variables] != self.dtypes

    @property
    def homes(self) -> dict[int, keras.Variable]:
        """The model's variable by the `id` of what is updated for it."""
        return dict(zip(map(id, self.targets), self.variables, strict=True))


def optimizer_of(model: keras.Model) -> keras.optimizers.Optimizer | None:
    """Returns the optimizer a model is compiled with, if it is."""
    compiled = getattr(model, "compiled", False)
    return getattr(model, "optimizer", None) if compiled else None


def take(model: keras.Model) -> Handover | None:
    """Notes the state of a model's optimizer; before variables are cast."""
    optimizer = optimizer_of(model)
    workers, masters = (
        optimizers.unwrapped(optimizer),
        sixteen_bit_optimizer.owner(optimizer),
    )
    if not workers or not workers[0].built:
        return None
    # A wrapper around them may not have been used yet.
    variables = optimizers.remembered(masters or workers[0])
    behind = sixteen_bit_optimizer.stand_ins(optimizer)
    if behind is not None:
        behind.refresh()
    read = (lambda v: v.value) if behind is None else behind.read
    places = _places(optimizer, variables)
    return Handover(
        workers,
        variables,
        _targets(optimizer, variables),
        [v.dtype for v in variables],
        None if places is None else _read(places),
        [ops.convert_to_numpy(ops.cast(read(v), "float32")) for v in variables],
    )


def give(model: keras.Model, state: Handover | None) -> None:
    """Goes on with a state in the model's optimizer; after the cast."""
    optimizer = optimizer_of(model)
    if state is None or optimizer is None:
        return
    if not optimizer.built:
        with variables_of.strategy_scope(model):
            optimizer.build(state.variables)
    workers = optimizers.unwrapped(optimizer)
    if [id(x) for x in workers] == [id(x) for x in state.workers]:
        # The slots are at hand; what they belong to may lie elsewhere now.
        targets = _targets(optimizer, state.variables)
        moved = dict(zip(map(id, state.targets), targets, strict=True))
        for worker in workers:
            slots_by_variable.remembered(worker)(moved)
    elif not _write(optimizer, state):
        _messages.warn(
            "%s cannot go on with the state of %s; its moments and its "
            "count of steps start anew.",
            type(workers[0]).__name__,
            type(state.workers[0]).__name__,
        )
    masters = sixteen_bit_optimizer.owner(optimizer)
    known = set(map(id, optimizers.remembered(masters))) if masters else ()
    for variable, weight in zip(state.variables, state.weights, strict=True):
        if masters is not None and id(variable) in known:
            masters.assign_float32(variable, weight)
        else:
            variable.assign(ops.cast(weight, variable.dtype))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where one slot of one of the model's variables lies."""

    key: Key
    holder: keras.Variable
    span: slice  # of the holder, as a vector
    shape: tuple[int, ...]


def _places(optimizer: Any, variables: list) -> list[_Place] | None:
    """Finds the slots of variables, `None` where one is not certain."""
    position: dict[int, list[int]] = {}
    for number, target in enumerate(_targets(optimizer, variables)):
        position.setdefault(id(target), []).append(number)
    behind = sixteen_bit_optimizer.stand_ins(optimizer)
    places = []
    for number, worker in enumerate(optimizers.unwrapped(optimizer)):
        for name, value in slots_by_variable.numbers(worker).items():
            key = number, name, _ONCE
            places.append(_Place(key, value, slice(None), ()))
        slots = slots_by_variable.slots(worker)
        known = optimizers.remembered(worker)
        if slots is None or any(id(target) not in position for target in known):
            return None
        pairs = (
            (name, target, slot)
            for name, values in slots.items()
            for target, slot in zip(known, values, strict=True)
            if slot is not None
        )
        for name, target, slot in pairs:
            for index in position[id(target)]:
                variable = variables[index]
                span = behind.span(variable) if behind else None
                shape = tuple(variable.shape if span else slot.shape)
                key, part = (number, name, index), span or slice(None)
                places.append(_Place(key, slot, part, shape))
    return places


def _read(places: list[_Place]) -> dict[Key, np.ndarray]:
    vectors = _vectors(places)
    return {
        place.key: vectors[id(place.holder)][place.span].reshape(place.shape)
        for place in places
    }


def _write(optimizer: Any, state: Handover) -> bool:
    """Writes a state if each slot and counter finds its own, or nothing."""
    workers = optimizers.unwrapped(optimizer)
    places = _places(optimizer, state.variables)
    if (
        places is None
        or state.numbers is None
        or [type(x) for x in workers] != [type(x) for x in state.workers]
        or {place.key: place.shape for place in places}
        != {key: value.shape for key, value in state.numbers.items()}
    ):
        return False
    vectors = _vectors(places)
    for place in places:
        vectors[id(place.holder)][place.span] = state.numbers[place.key].ravel()
    for holder in {id(place.holder): place.holder for place in places}.values():
        holder.assign(vectors[id(holder)].reshape(tuple(holder.shape)))
    return True


def _vectors(places: list[_Place]) -> dict[int, np.ndarray]:
    """Copies each holder once to the host, as a vector."""
    holders = {id(place.holder): place.holder for place in places}
    return {
        key: np.array(ops.convert_to_numpy(holder)).ravel()
        for key, holder in holders.items()
    }


def _targets(optimizer: Any, variables: list) -> list[keras.Variable]:
    """Returns what an optimizer's workers update for the model's variables."""
    behind = sixteen_bit_optimizer.stand_ins(optimizer)
    return variables if behind is None else [*map(behind.target, variables)]
