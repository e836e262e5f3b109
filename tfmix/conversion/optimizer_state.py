"""Carries the optimizer's state over when a model's variables are cast.

With 16-bit variables, the moments belong to the master weights, otherwise to
the variables themselves. A conversion keeps them, in both directions.
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

# The number of the optimizer, its attribute, and the number of the variable.
Key = tuple[int, str, int]
# This number stands for no variable: counters and rates belong to all of them.
_ONCE = -1


@dataclasses.dataclass(frozen=True)
class Handover:
    """The state of an optimizer, keyed by the model's variables."""

    workers: list[keras.optimizers.Optimizer]  # the innermost optimizers
    variables: list[keras.Variable]  # the model's variables they update
    targets: list[keras.Variable]  # the masters, or the variables themselves
    dtypes: list[str]  # the dtypes of the variables at that time
    # The state and counters; `None` if their variables are not certain.
    numbers: dict[Key, np.ndarray] | None
    weights: list[np.ndarray]  # the weights in float32, from masters if any

    @property
    def cast(self) -> bool:
        """True if any variable has been cast since."""
        return [v.dtype for v in self.variables] != self.dtypes

    @property
    def homes(self) -> dict[int, keras.Variable]:
        """The model's variables, by the `id` of their targets."""
        return dict(zip(map(id, self.targets), self.variables, strict=True))


def optimizer_of(model: keras.Model) -> keras.optimizers.Optimizer | None:
    """Returns a compiled model's optimizer, `None` for other models."""
    compiled = getattr(model, "compiled", False)
    return getattr(model, "optimizer", None) if compiled else None


def take(model: keras.Model) -> Handover | None:
    """Saves the state of a model's optimizer, before variables are cast."""
    optimizer = optimizer_of(model)
    workers = optimizers.unwrapped(optimizer)
    masters = sixteen_bit_optimizer.owner(optimizer)
    if not workers or not workers[0].built:
        return None
    # A wrapper around them may not be built yet.
    variables = optimizers.remembered(masters or workers[0])
    stand_ins = sixteen_bit_optimizer.stand_ins(optimizer)
    if stand_ins is not None:
        stand_ins.refresh()
    read = (lambda v: v.value) if stand_ins is None else stand_ins.read
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
    """Restores a state in the model's optimizer, after the cast."""
    optimizer = optimizer_of(model)
    if state is None or optimizer is None:
        return
    if not optimizer.built:
        with variables_of.strategy_scope(model):
            optimizer.build(state.variables)
    workers = optimizers.unwrapped(optimizer)
    if [id(x) for x in workers] == [id(x) for x in state.workers]:
        # The optimizer still has its state, but maybe for other variables.
        targets = _targets(optimizer, state.variables)
        moved = dict(zip(map(id, state.targets), targets, strict=True))
        for worker in workers:
            slots_by_variable.remembered(worker)(moved)
    elif not _write(optimizer, state):
        _messages.warn(
            "%s cannot continue with the optimizer state of %s: its moments "
            "and its count of steps start from zero.",
            type(workers[0]).__name__,
            type(state.workers[0]).__name__,
        )
    masters = sixteen_bit_optimizer.owner(optimizer)
    owned = set(map(id, optimizers.remembered(masters))) if masters else ()
    for variable, weight in zip(state.variables, state.weights, strict=True):
        if masters is not None and id(variable) in owned:
            masters.assign_float32(variable, weight)
        else:
            variable.assign(ops.cast(weight, variable.dtype))


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of one variable's state, such as a moment."""

    key: Key
    holder: keras.Variable
    span: slice  # a part of the holder, flattened
    shape: tuple[int, ...]


def _places(optimizer: Any, variables: list) -> list[_Place] | None:
    """Finds the optimizer state of variables, `None` if it is not certain."""
    position: dict[int, list[int]] = {}
    for number, target in enumerate(_targets(optimizer, variables)):
        position.setdefault(id(target), []).append(number)
    stand_ins = sixteen_bit_optimizer.stand_ins(optimizer)
    places = []
    for number, worker in enumerate(optimizers.unwrapped(optimizer)):
        for name, value in slots_by_variable.numbers(worker).items():
            key = number, name, _ONCE
            places.append(_Place(key, value, slice(None), ()))
        slots = slots_by_variable.slots(worker)
        updated = optimizers.remembered(worker)
        if slots is None or any(
            id(target) not in position for target in updated
        ):
            return None
        pairs = (
            (name, target, slot)
            for name, values in slots.items()
            for target, slot in zip(updated, values, strict=True)
            if slot is not None
        )
        for name, target, slot in pairs:
            for index in position[id(target)]:
                variable = variables[index]
                span = stand_ins.span(variable) if stand_ins else None
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
    """Writes a state if it fits the optimizer, and returns whether it does."""
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
    """Returns the masters of variables, or the variables themselves."""
    stand_ins = sixteen_bit_optimizer.stand_ins(optimizer)
    if stand_ins is None:
        return variables
    return [stand_ins.target(variable) for variable in variables]
