"""Makes unwrapped optimizers skip the steps that are not finite.

This protects loops without `compile`, and models with several optimizers.
"""

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

from tfmix import _messages
from tfmix._keras import (
    context_values,
    files,
    optimizers,
    replacing,
    tracing,
    training,
)
from tfmix._keras import variables as keras_variables
from tfmix.gradient_scaling import placing
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules, standstill
from tfmix.optimizers import sixteen_bit_optimizer
from tfmix.step import finite, gradients, guard, replicas

# The arguments of these methods.
_ORDER = "grads", "trainable_variables"
_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


class _Place:
    """The place of gradients for an optimizer that has no loss scale."""

    rule = rules.DynamicLossScale()

    def __init__(self) -> None:
        # The rule's state: the scale, and two counts.
        self._state: Any = np.array(self.rule.init(), "float32")
        if _ON_TENSORFLOW:
            self._state = keras.Variable(self._state, trainable=False)

    @property
    def variables(self) -> list[keras.Variable]:
        """The variable with the state on the device."""
        return [self._state] if _ON_TENSORFLOW else []

    def place(self) -> Any:
        """Returns the place; `None` where JAX would make a constant of it."""
        is_compiled = tracing.trace() != tracing.EAGER
        return None if is_compiled else self._of(self._state)

    def move(self, applied: Any, is_data: Any) -> Any:
        """Changes the place after a step; returns it.

        Args:
            applied: Bool or boolean scalar tensor, whether it was applied.
            is_data: The same, whether no place would have helped.
        """
        before = self._state
        if isinstance(applied, bool):
            before = keras_variables.host_value(before)
            after = np.array(self.rule.update(_fields(before), applied))
            if bool(is_data):
                after = before
        else:
            after = ops.stack(self.rule.update(_fields(before), applied))
            after = ops.where(is_data, before, after)
        if not _ON_TENSORFLOW:
            self._state = after
        elif after is not before:
            self._state.assign(after)
        return self._of(after)

    def _of(self, state: Any) -> Any:
        return self.rule.current(_fields(state)) / self.rule.init()[0]


def _fields(state: Any) -> rules.LossScaleState:
    return rules.LossScaleState(*(state[n] for n in range(3)))


class Skips:
    """Counts the skipped steps of one optimizer, like `LossScaleOptimizer`.

    TensorFlow counts them in a variable that a SavedModel saves with the
    optimizer's own. A function that JAX compiles can only change the variables
    that it is given, so JAX counts eager steps, those that `ask` reports, and
    in `fit` those that were not applied.
    """

    rule = rules.NoLossScale()
    loss_scale = 1.0
    gradient_norm = math.nan
    # It is not known why a step was skipped.
    data_skips = None

    def __init__(self, optimizer: Any, variables: Sequence) -> None:
        self.applies = optimizers.applies(optimizer)
        self._name = optimizer.name
        self._paths = optimizers.paths(variables)
        # It holds all skipped steps, those in a row, and for each variable
        # those in which its gradient was not finite.
        self._counts: Any = np.zeros(2 + len(variables), "int32")
        if _ON_TENSORFLOW:
            self._counts = keras.Variable(
                self._counts, dtype="int32", trainable=False
            )
            files.save_with(optimizer, self._counts)
        # What compiled steps have reported, and nobody has read (JAX).
        self._reported: list[tuple] = []
        self._place = _Place()
        placing.note(self._place, variables)
        for variable in self._place.variables:
            files.save_with(optimizer, variable)

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps."""
        return int(self._host_counts()[0])

    @property
    def consecutive_skips(self) -> int:
        """The number of skipped steps since the last applied one."""
        return int(self._host_counts()[1])

    @property
    def overflow_counts(self) -> dict[str, int]:
        """Skipped steps per variable, by its path."""
        counts = self._host_counts()[2:].tolist()
        return dict(zip(self._paths, counts, strict=True))

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables with the counts on the device."""
        return [self._counts, *self._place.variables] if _ON_TENSORFLOW else []

    def move(self, applied: Any, grads: Sequence, updated: Sequence) -> None:
        """Moves the place of gradients in models, after the step was counted.

        Args:
            applied: Bool or boolean scalar tensor, whether it was applied.
            grads: The gradients, summed over replicas.
            updated: The variable of each.
        """
        if _ON_TENSORFLOW:
            is_asked = bool(placing.variables_of(updated))
        else:
            is_asked = isinstance(applied, bool)
        if not is_asked:
            return
        is_data: Any = False
        if applied is not True:
            own = gradients.without_values(grads, updated)
            is_data = placing.stays(
                gradients.blames_data(own, ops.logical_or), self._counts[1] - 1
            )
        now = self._place.move(applied, is_data)
        if _ON_TENSORFLOW:
            placing.tell(self._place, updated, now)

    def count(self, applied: Any, bad: Any) -> None:
        """Counts a step, and warns of the eighth skip in a row of a loop."""
        if not isinstance(applied, bool):
            if _ON_TENSORFLOW:
                self._counts.assign(self._after(applied, bad))
            else:
                _ask(self._reported.append, (applied, bad))
            return
        # An applied step writes only if it ends skips in a row.
        if applied and not self.consecutive_skips:
            return
        self._add(applied, bad)
        # The line after an epoch of `fit` says more than a warning here.
        if not context_values.block.get().in_fit:
            standstill.warn_of_eighth(
                self._name, self._paths, self.consecutive_skips, bad
            )

    def count_rest(self, steps: int, applied: int) -> None:
        """Counts those of an epoch's steps that were not applied (JAX)."""
        lost = steps - applied
        counts = np.array(self._host_counts())
        counts[:2] += lost
        counts[1] *= not applied
        self._counts = counts

    def _after(self, applied: Any, bad: Any) -> Any:
        """Returns the counts after a step of a graph (TensorFlow)."""
        is_bad = ops.reshape(ops.logical_not(applied), (1,))
        flags = ops.cast(ops.concatenate([is_bad, is_bad, bad]), "int32")
        # The second number counts skips in a row. An applied step ends them.
        in_a_row = np.arange(len(self._paths) + 2) == 1
        ended = ops.logical_and(in_a_row, ops.logical_not(is_bad))
        return ops.where(ended, 0, ops.add(self._counts, flags))

    def _add(self, applied: Any, bad: Any) -> None:
        counts = np.array(keras_variables.host_value(self._counts))
        counts[1] *= not applied
        counts += np.concatenate([[not applied] * 2, np.asarray(bad)])
        if _ON_TENSORFLOW:
            self._counts.assign(counts)
        else:
            self._counts = counts

    def _host_counts(self) -> np.ndarray:
        while self._reported:
            self._add(*self._reported.pop(0))
        return keras_variables.host_value(self._counts)


def _ask_nobody(tell: Callable[[Any], None], values: Any) -> None:
    """Drops what a compiled step knows, as it is not asked."""


# Hands a function the values of tensors of a step that JAX compiles.
_ask: Callable[[Callable[[Any], None], Any], None] = _ask_nobody


def ask(by: Callable[[Callable[[Any], None], Any], None]) -> None:
    """Sets what asks compiled steps under JAX whether they were skipped.

    Args:
        by: Gets a function and tensors of the step. It calls the function with
            their values after the step.
    """
    global _ask
    _ask = by


# Objects that count the skipped steps of an optimizer.
Skipper: TypeAlias = scaling.LossScaleOptimizer | Skips
_skips: weakref.WeakKeyDictionary[Any, Skips] = weakref.WeakKeyDictionary()
_left_alone: weakref.WeakSet[Any] = weakref.WeakSet()


def applying(original: Callable) -> Callable:
    """Returns the `apply` of optimizers that nothing has wrapped."""

    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_call = functools.partial(replacing.argument, _ORDER, args, kwargs)
        grads, variables = of_call("grads", ()), of_call("trainable_variables")
        is_mine = not (
            finite.is_chosen()
            or isinstance(self, keras.optimizers.LossScaleOptimizer)
            or self.loss_scale_factor
            or self in _left_alone
        )
        # Keras refuses gradients without variables before the build.
        is_early = variables is None and not self.built
        if is_early or not (len(grads) and is_mine):
            return original(self, *args, **kwargs)
        _tell_of_lost_updates(self, variables)
        _apply(self, original, list(grads), variables)
        return None

    return apply


def _apply(
    optimizer: Any, original: Callable, grads: list, variables: Any
) -> None:
    if optimizer not in _skips:
        built = optimizer.built and optimizers.remembered(optimizer)
        first = list(built or variables)
        build = functools.partial(_build, optimizer, first)
        replicas.once_for_all(build, first)
    known = optimizers.remembered(optimizer)
    these = list(known if variables is None else variables)
    guard.note_update(these)
    skips = _skips[optimizer]

    def count(applied: Any, bad: Any, _: list, summed: list) -> None:
        skips.count(applied, bad)
        skips.move(applied, summed, these)

    applied = finite.take(
        optimizer,
        grads,
        these,
        functools.partial(original, optimizer),
        assigned=[*optimizer.variables, *known],
        counters=[*skips.variables, *placing.variables_of(these)],
        count=count,
    )
    guard.report(applied)


def _build(optimizer: Any, variables: Sequence) -> None:
    if not optimizer.built:
        optimizer.build(variables)
    _skips[optimizer] = Skips(optimizer, variables)


def _tell_of_lost_updates(optimizer: Any, variables: Any) -> None:
    """Warns of 16-bit variables without float32 master weights."""
    if isinstance(optimizer, sixteen_bit_optimizer.SixteenBitOptimizer):
        return
    if variables is None:
        variables = optimizers.remembered(optimizer)
    if any(map(keras_variables.is_narrow, variables)):
        _messages.warn_once(
            "a Keras optimizer updates 16-bit variables without float32 "
            "masters: updates below half a step of the format are lost, "
            "and Adam's epsilon is 0 in float16. Write "
            f"tfmix.optimizers.MasterWeightOptimizer("
            f"{type(optimizer).__name__}(...)), or "
            "use a 'mixed_' policy."
        )


def leave_alone(optimizer: keras.optimizers.Optimizer | None) -> None:
    """Leaves an optimizer to Keras, because its model is not in 16 bit."""
    if optimizer is not None:
        _left_alone.add(optimizer)


def held_beside(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Lists the optimizers in a model's scaler that the model also holds.

    A user's own step may use the optimizer that `compile` got, without the
    wrappers that `compile` has added.
    """
    held = {id(value) for value in vars(model).values()}
    return [
        inner
        for scaler in scaling.scalers(model)
        for inner in optimizers.chain(scaler.inner_optimizer)
        if id(inner) in held
    ]


def skippers(model: keras.Model) -> list[Skipper]:
    """Lists the counters of skips of the optimizers that a model holds."""
    held = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
    ]
    bare = [_skips[x] for x in held if x in _skips]
    return [*scaling.scalers(model), *bare]


def uncounted(model: keras.Model) -> Skips | None:
    """Returns the counter of an optimizer whose steps of `fit` count nothing.

    Under JAX it is that of an unwrapped optimizer. Keras's own step applies
    gradients once, whereas a user's may do so now and then.
    """
    is_counted = _ON_TENSORFLOW or model.run_eagerly or _ask is not _ask_nobody
    if is_counted or training.has_own_step(model):
        return None
    return None if model.optimizer is None else _skips.get(model.optimizer)
