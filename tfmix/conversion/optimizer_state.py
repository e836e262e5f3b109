"""The state of a model's optimizer, handed over when its variables are cast.

An optimizer with 16-bit variables keeps moments of its masters, one without
of the variables themselves; a conversion, there or back, goes on with what
was there.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from absl import logging
from keras import ops

from tfmix._keras import optimizer_slots, optimizers, variables
from tfmix.variables import base, flat

# Which of the optimizers that update, its attribute, which model variable.
Key = tuple[int, str, int]


@dataclasses.dataclass(frozen=True)
class Handover:
    """What an optimizer knew, by the model's variables.

    Attributes:
        workers: The optimizers that make the updates.
        variables: The model's variables they were built for.
        targets: What they update in their place, masters for example.
        dtypes: The variables' dtypes by then.
        slots: One array per slot and variable, `None` where it is not known
            which slot is whose.
        numbers: Counters, rates and the like, by worker and attribute.
        weights: The variables' values in float32, from masters if there are.
    """

    workers: list[keras.optimizers.Optimizer]
    variables: list[keras.Variable]
    targets: list[keras.Variable]
    dtypes: list[str]
    slots: dict[Key, np.ndarray] | None
    numbers: dict[tuple[int, str], np.ndarray]
    weights: list[np.ndarray]

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


def owner(optimizer: Any) -> base.SixteenBitOptimizer | None:
    """Returns what keeps an optimizer's 16-bit variables, if anything does."""
    for part in optimizer_slots.parts(optimizer):
        if isinstance(part, base.SixteenBitOptimizer):
            return part
    return None


def take(model: keras.Model) -> Handover | None:
    """Notes the state of a model's optimizer; before variables are cast.

    Returns:
        The state, `None` if there is none to hand over.
    """
    optimizer = optimizer_of(model)
    workers = optimizer_slots.workers(optimizer)
    if optimizer is None or not optimizer.built or not workers[0].built:
        return None
    variables = optimizers.remembered(optimizer)
    masters = owner(optimizer)
    places = _places(optimizer, variables)
    return Handover(
        workers,
        variables,
        _targets(optimizer, variables),
        [v.dtype for v in variables],
        None if places is None else _read(places),
        {
            (position, name): ops.convert_to_numpy(value)
            for position, worker in enumerate(workers)
            for name, value in optimizer_slots.numbers(worker).items()
        },
        [
            ops.convert_to_numpy(
                ops.cast(v.value, "float32")
                if masters is None
                else masters.read_float32(v)
            )
            for v in variables
        ],
    )


def give(model: keras.Model, state: Handover | None) -> None:
    """Goes on with a state in the model's optimizer; after the cast."""
    optimizer = optimizer_of(model)
    if state is None or optimizer is None:
        return
    if not optimizer.built:
        with variables.strategy_scope(model):
            optimizer.build(state.variables)
    workers = optimizer_slots.workers(optimizer)
    if [id(x) for x in workers] == [id(x) for x in state.workers]:
        # The slots are at hand; what they belong to may lie elsewhere now.
        targets = _targets(optimizer, state.variables)
        moved = dict(zip(map(id, state.targets), targets, strict=True))
        for worker in workers:
            optimizer_slots.move(worker, moved)
    elif not _write(optimizer, state):
        logging.warning(
            "tfmix: %s cannot go on with the state of %s; its moments and its "
            "count of steps start anew.",
            type(workers[0]).__name__,
            type(state.workers[0]).__name__,
        )
    masters = owner(optimizer)
    for variable, weight in zip(state.variables, state.weights, strict=True):
        if masters is not None and _knows(masters, variable):
            masters.assign_float32(variable, weight)
        else:
            variable.assign(ops.cast(weight, variable.dtype))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where one slot of one of the model's variables lies."""

    key: Key
    slot: keras.Variable
    variable: keras.Variable
    group: flat.Group | None  # whose vector holds it

    @property
    def span(self) -> slice:
        """The part of the slot, as a vector, that is the variable's."""
        if self.group is None:
            return slice(None)
        end = self.group.ends[self.group.position(self.variable)]
        return slice(end - int(np.prod(self.variable.shape)), end)

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.slot if self.group is None else self.variable
        return tuple(whole.shape)


def _places(optimizer: Any, variables: list) -> list[_Place] | None:
    """Finds the slots of variables, `None` where one is not certain."""
    targets = _targets(optimizer, variables)
    groups = getattr(_store(optimizer), "_group_of", {})
    places = []
    for number, worker in enumerate(optimizer_slots.workers(optimizer)):
        slots = optimizer_slots.slots(worker)
        if slots is None:
            return None
        known = optimizers.remembered(worker)
        index = {id(target): place for place, target in enumerate(known)}
        if not set(index) <= set(map(id, targets)):
            return None
        places += [
            _Place((number, name, position), slot, variable, group)
            for position, variable in enumerate(variables)
            if (place := index.get(id(targets[position]))) is not None
            for name, values in slots.items()
            if (slot := values[place]) is not None
            for group in [groups.get(id(variable))]
        ]
    return places


def _read(places: list[_Place]) -> dict[Key, np.ndarray]:
    vectors = _vectors(places)
    return {
        place.key: vectors[id(place.slot)][place.span].reshape(place.shape)
        for place in places
    }


def _write(optimizer: Any, state: Handover) -> bool:
    """Writes a state if each slot and number finds its own, or nothing."""
    workers = optimizer_slots.workers(optimizer)
    places = _places(optimizer, state.variables)
    found = {
        (position, name): value
        for position, worker in enumerate(workers)
        for name, value in optimizer_slots.numbers(worker).items()
    }
    if (
        places is None
        or state.slots is None
        or [type(x) for x in workers] != [type(x) for x in state.workers]
        or found.keys() != state.numbers.keys()
        or {place.key: place.shape for place in places}
        != {key: value.shape for key, value in state.slots.items()}
    ):
        return False
    vectors = _vectors(places)
    for place in places:
        vectors[id(place.slot)][place.span] = state.slots[place.key].ravel()
    for slot in {id(place.slot): place.slot for place in places}.values():
        slot.assign(vectors[id(slot)].reshape(tuple(slot.shape)))
    for key, number in found.items():
        number.assign(state.numbers[key])
    return True


def _vectors(places: list[_Place]) -> dict[int, np.ndarray]:
    """Copies each slot once to the host, as a vector."""
    slots = {id(place.slot): place.slot for place in places}
    return {
        key: np.array(ops.convert_to_numpy(slot)).ravel()
        for key, slot in slots.items()
    }


def _store(optimizer: Any) -> Any:
    return getattr(owner(optimizer), "_store", None)


def _targets(optimizer: Any, variables: list) -> list[keras.Variable]:
    """Returns what an optimizer's workers update for the model's variables."""
    store = _store(optimizer)
    return variables if store is None else [*map(store.target, variables)]


def _knows(masters: base.SixteenBitOptimizer, variable: Any) -> bool:
    return any(variable is each for each in optimizers.remembered(masters))
