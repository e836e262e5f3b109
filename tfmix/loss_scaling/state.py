"""What an optimizer's steps change beside weights: counts, scale, place.

Wrapped and unwrapped optimizers have the same state. A `LossScaleOptimizer`
adds its variables to its own, and saves them. For an unwrapped one they lie
beside it, and its scale only moves the gradients inside models.

Gradients that enter a model are brought to the model's place in float16's
range, the lowest of the optimizers that update its variables. An optimizer
first uses all the room that float16 has, for gradients that shrink inside, such
as those of a mean. Gradients that grow inside overflow; then it falls back to
order one, halves its place at each further overflow, and doubles it after many
good steps. Where no optimizer can lower the place, it is 1.

In `fit` the optimizer that `compile` got is known before the step is traced,
and its place is read from its state. Elsewhere the model is called before it is
known who will update it. Under TensorFlow a variable of the model holds its
place, which each step of an optimizer lowers or raises. Under JAX a compiled
step has no other state than what it is given, so the optimizer's variables must
be among its arguments; a `keras.StatelessScope` around the model's call shows
them.

A file holds the state where a run without loss scaling has it: in the
optimizer's place what the inner optimizer saves, and beside it what only
scaling needs. So either run goes on from the other's file.
"""

import functools
import numbers
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from tfmix import _messages
from tfmix._keras import context, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import rules, standstill
from tfmix.step import guard, replicas

_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# The place of a model that no optimizer has moved, above all others.
_NOBODYS = 2.0**126
# An optimizer's place, until gradients overflow inside.
_FREE = 2.0**15
# As many bad batches may follow one another in a loop.
_BAD_BATCHES = 2

# Keras's scaler saves these before the inner optimizer's variables. It does
# not use the first two, and has no others until it is built.
_KERAS_OWN = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


class Values(NamedTuple):
    """The state before or after a step: numbers, tensors or variables.

    Attributes:
        scale: The rule's state, a named tuple of scalars.
        skipped_steps: Int32 scalar, steps not applied so far.
        consecutive_skips: Int32 scalar, skipped steps since the last applied
            one.
        data_skips: Int32 scalar, skipped steps of `after`'s `is_data`.
        overflow_counts: Int32 vector, for each variable the number of skipped
            steps in which its gradient was not finite; 0 before it is known
            how many there are.
    """

    scale: Any
    skipped_steps: Any
    consecutive_skips: Any
    data_skips: Any
    overflow_counts: Any = 0

    def after(
        self,
        rule: rules.LossScale | None,
        applied: Any,
        bad: Any,
        is_data: Any,
    ) -> "Values":
        """Returns the state after a step.

        Args:
            rule: The rule of the loss scale; `None` if it does not move.
            applied: Bool or boolean scalar tensor, whether it was applied.
            bad: Boolean vector, the variables with a gradient not finite.
            is_data: Bool or boolean scalar tensor, whether the step is skipped
                because the data or the loss is not finite. No scale helps then,
                so the scale does not change.
        """
        select = keras_variables.select
        scale, of_data = self.scale, 0
        if rule is not None:
            scale = rule.update(scale, applied)
        if is_data is not False:
            scale = select(is_data, self.scale, scale)
            of_data = select(is_data, 1, 0)
        in_a_row = self.consecutive_skips
        # An operation of an eager good step would only take time.
        bad = 0 if applied is True else ops.cast(bad, "int32")
        return Values(
            scale=scale,
            skipped_steps=self.skipped_steps + select(applied, 0, 1),
            consecutive_skips=select(applied, in_a_row * 0, in_a_row + 1),
            data_skips=self.data_skips + of_data,
            overflow_counts=self.overflow_counts + bad,
        )


class State:
    """The state of one optimizer.

    Args:
        rule: The rule of the loss scale.
        add: Makes what holds a value, such as a variable, from its name, its
            first value and its dtype.
    """

    def __init__(
        self, rule: rules.LossScale, add: Callable[[str, Any, str], Any]
    ) -> None:
        self.rule, self._add = rule, add
        self.name, self.paths = "", list[str]()
        # The places of models that it moves, by their `id`s. They live as long
        # as it does, because a compiled step writes them.
        self._places: dict[int, keras.Variable] = {}
        initial = rule.init()
        scale = {}
        # Keras's order lets its files be read by position.
        for field in sorted(initial._fields, key=lambda f: f != "good_steps"):
            value = getattr(initial, field)
            whole = isinstance(value, numbers.Integral)
            scale[field] = add(field, value, "int" if whole else "float32")
        names = "skipped_steps", "consecutive_skips", "data_skips"
        counts = (add(name, 0, "int32") for name in names)
        self.held = Values(type(initial)(**scale), *counts)

    def build(self, name: str, variables: Sequence) -> None:
        """Adds the counts of the variables that an optimizer updates."""
        self.name, self.paths = name, optimizers.paths(variables)
        _updated[self] = {id(variable) for variable in variables}
        zeros = np.zeros(len(variables), "int32")
        counts = self._add("overflow_counts", zeros, "int32")
        self.held = self.held._replace(overflow_counts=counts)

    def scale_by(self, read: Callable[[Any], Any]) -> Any:
        """Returns the rule's state, each variable read by a function."""
        return tree.map_structure(read, self.held.scale)

    def place(self) -> Any:
        """Returns where gradients lie inside a model: at most about there.

        It is the loss scale divided by its first value, and `_FREE` times that
        while no overflow has lowered the scale: a number, or a
        float32 scalar tensor that is not copied to the host. It is `None` where
        JAX would make a constant of it.
        """
        if rules.is_constant(self.rule):
            return 1.0
        scale = self.scale_by(keras_variables.value_in_scopes)
        return None if scale[0] is None else self._place_of(scale)

    def count(
        self,
        applied: Any,
        bad: Any,
        updated: Sequence = (),
        is_data: Callable[[], Any] | None = None,
    ) -> None:
        """Counts a step, and moves the scale and the gradients of models.

        Args:
            applied: Bool or boolean scalar tensor, whether it was applied.
            bad: Boolean vector, the optimizer's variables with a gradient that
                is not finite.
            updated: The variables that the step updates.
            is_data: Returns whether a skip is the data's fault: a bool or
                boolean scalar tensor. `None` if the scale does not move.
        """
        before = tree.map_structure(keras_variables.reader(), self.held)
        rule, of_data = None if is_data is None else self.rule, False
        if is_data is not None and applied is not True:
            of_data = _stays(is_data(), before.consecutive_skips)
        after = before.after(rule, applied, bad, of_data)
        keras_variables.assign_new(self.held, before, after)
        moves = rule is not None and place_variables(updated)
        if moves and not rules.is_constant(self.rule):
            places = self._place_of(before.scale), self._place_of(after.scale)
            self.tell(updated, *places)

    def tell(self, updated: Sequence, before: Any, after: Any) -> None:
        """Tells models their place after a step (TensorFlow).

        A place below the optimizer's own is that of another one, and stays
        unless this one asks for less. If two have the same and one raises its
        own, the next step of the other lowers the model's again.

        Args:
            updated: The variables that it updates, which belong to the models.
            before: Its place before the step: a number or a float32 scalar.
            after: The same after it.
        """
        for variable in place_variables(updated):
            self._places[id(variable)] = variable
            now = keras_variables.reader()(variable)
            lower = keras_variables.select(after < now, after, now)
            new = keras_variables.select(now < before, lower, after)
            keras_variables.assign_new(variable, now, new)

    def _place_of(self, scale: Any) -> Any:
        ratio = self.rule.current(scale) / self.rule.init()[0]
        return keras_variables.select(ratio < 1.0, ratio, ratio * _FREE)


# The `id`s of the variables that an optimizer updates, by its state (JAX).
_updated: weakref.WeakKeyDictionary[State, set[int]] = (
    weakref.WeakKeyDictionary()
)
# The places of models that are called outside of Keras's step (TensorFlow).
_places: weakref.WeakKeyDictionary[keras.Model, keras.Variable] = (
    weakref.WeakKeyDictionary()
)


def place_of(model: keras.Model) -> Any:
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
            state.place()
            for state, variables in _updated.items()
            if not held.isdisjoint(variables)
        ]
        known += [place for place in places if place is not None]
    return functools.reduce(ops.minimum, known) if known else 1.0


def place_variables(updated: Sequence) -> list[keras.Variable]:
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


def _stays(is_data: Any, in_a_row: Any) -> Any:
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


class Counts:
    """Mixin: what a state has counted; reading it waits for the device."""

    _state: State
    applies: keras.Variable

    def read(self) -> tuple[Any, Values]:
        """Returns the number of `apply` calls and the state, as NumPy has them.

        All are `None` in a function that is being compiled.
        """
        numbers: tuple[Any, Values] = tree.map_structure(
            keras_variables.host_value, (self.applies, self._state.held)
        )
        return numbers

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps."""
        return int(on_host(self._state.held.skipped_steps))

    @property
    def consecutive_skips(self) -> int:
        """The number of skipped steps since the last applied one."""
        return int(on_host(self._state.held.consecutive_skips))

    @property
    def overflow_counts(self) -> dict[str, int]:
        """Skipped steps per variable, by its path."""
        if not self._state.paths:
            return {}
        numbers = on_host(self._state.held.overflow_counts).tolist()
        return dict(zip(self._state.paths, numbers, strict=True))

    def warn(self, applied: Any) -> None:
        """Warns of the eighth skip in a row of an eager loop."""
        # The line after an epoch of `fit` says more.
        if applied is False and context.block.get().step is None:
            standstill.warn_of_eighth(
                self._state.name, self.consecutive_skips, self.overflow_counts
            )


# The counts of optimizers that nothing wraps.
unwrapped: weakref.WeakKeyDictionary[Any, Counts] = weakref.WeakKeyDictionary()


def counts_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what has counted an optimizer's skipped steps, or `None`."""
    is_wrapper = isinstance(optimizer, Counts)
    return optimizer if is_wrapper else unwrapped.get(optimizer)


def on_host(variable: Any) -> np.ndarray:
    """Returns the value of a variable; refuses a function being compiled."""
    value: np.ndarray | None = keras_variables.host_value(variable)
    if value is None:
        raise ValueError(
            "This function is being compiled, and counters are numbers on the "
            f"host. Received: a call that reads {variable.path!r} in it. Read "
            "`skipped_steps`, `consecutive_skips` and `overflow_counts`, and "
            "call `check_health`, outside the compiled function, between two "
            "steps; in it, `last_step_applied()` returns whether the step was "
            "applied."
        )
    return value


class OwnState(optimizers.Saveable):
    """The part of the state that a run without loss scaling lacks."""

    def __init__(self, variables: Callable[[], list[keras.Variable]]) -> None:
        self._variables = variables

    def save_own_variables(self, store: Any) -> None:
        """Writes every variable under its name."""
        for variable in self._variables():
            store[variable.name] = np.asarray(variable.numpy())

    def load_own_variables(self, store: Any) -> None:
        """Reads every variable that the file has, if it is of this model."""
        self.assign({name: np.asarray(store[name]) for name in store.keys()})

    def assign(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Sets variables by name; what a file lacks keeps its value."""
        for variable in self._variables():
            array = arrays.get(variable.name)
            # The counts may be those of other variables, as `read` has said.
            if array is not None and array.shape == tuple(variable.shape):
                variable.assign(array)


def read(
    store: Any, optimizer: keras.optimizers.Optimizer, own: OwnState
) -> None:
    """Reads the state of a run with tfmix, with Keras's scaler, or with none.

    It warns if the state does not fit, like Keras, because weights can be
    loaded into any model. If the optimizer is not built, Keras's warning is
    enough, and says what it says without loss scaling.

    Args:
        store: Maps positions, as strings, to arrays, as Keras opens a file.
        optimizer: The loss-scale optimizer.
        own: Its own state, which some files hold in the same place.
    """
    arrays = {str(key): np.asarray(store[key]) for key in store.keys()}
    wrapped = [*optimizers.chain(optimizer.inner_optimizer)]
    for inner in wrapped:
        named, saved = _parts(arrays, len(inner.variables))
        shapes = [tuple(variable.shape) for variable in inner.variables]
        if [array.shape for array in saved] == shapes:
            keras_variables.assign_all(inner.variables, saved)
            own.assign(named)
            # Keras asks them next, and has them say what a file lacks.
            for one in wrapped:
                optimizers.expect_no_state(one)
            return
    if optimizer.built:
        _messages.warn(
            "the state of optimizer %r was not restored: it has %d variables, "
            "and the file %d, of another optimizer or of other trainable "
            "variables; to go on with it, compile with the optimizer that was "
            "saved, and change what is trainable after loading.",
            optimizer.name,
            len(optimizer.inner_optimizer.variables),
            len(saved),
        )
    # Otherwise Keras asks the inner optimizer next, which says so.


def _parts(
    arrays: Mapping[str, np.ndarray], count: int
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Splits a saved state into own variables and the inner optimizer's.

    Args:
        arrays: All arrays by their keys.
        count: The number of variables that the inner optimizer has.
    """
    keys = map(str, range(len(arrays)))
    numbered = [arrays[key] for key in keys if key in arrays]
    own = len(numbered) - count
    if own not in (2, 4):
        return dict(arrays), numbered
    return dict(zip(_KERAS_OWN, numbered[:own], strict=False)), numbered[own:]
