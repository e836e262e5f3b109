"""What an optimizer's steps change beside weights: its counts, and its scale.

Wrapped and unwrapped optimizers have the same state. A `LossScaleOptimizer`
adds its variables to its own, and saves them. For an unwrapped one they lie
beside it, and its scale only moves the gradients inside models.
"""

import numbers
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from tfmix._keras import context, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.gradient_scaling import placing
from tfmix.loss_scaling import rules, standstill


class Values(NamedTuple):
    """The state before or after a step: numbers, tensors or variables.

    Attributes:
        scale: The rule's state, a named tuple of scalars.
        skipped_steps: Int32 scalar, steps not applied so far.
        consecutive_skips: Int32 scalar, skipped steps since the last applied
            one.
        data_skips: Int32 scalar, skipped steps of `after`'s `is_data`.
        overflow_counts: Int32 vector, for each variable the number of skipped
            steps in which its gradient was not finite; `None` before it is
            known how many there are.
    """

    scale: Any
    skipped_steps: Any
    consecutive_skips: Any
    data_skips: Any
    overflow_counts: Any = None

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
        # For `placing.Mover`.
        self.places: dict[int, keras.Variable] = {}
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
        """Adds the counts of the variables of an optimizer of some name."""
        self.name, self.paths = name, optimizers.paths(variables)
        zeros = np.zeros(len(variables), "int32")
        counts = self._add("overflow_counts", zeros, "int32")
        self.held = self.held._replace(overflow_counts=counts)

    def scale_by(self, read: Callable[[Any], Any]) -> Any:
        """Returns the rule's state, each variable read by a function."""
        return tree.map_structure(read, self.held.scale)

    def place(self) -> Any:
        """Returns where gradients lie inside a model: at most about there.

        It is the loss scale divided by its first value, and `placing.FREE`
        times that while no overflow has lowered the scale: a number, or a
        float32 scalar tensor that is not copied to the host. It is `None` where
        JAX would make a constant of it.
        """
        if rules.is_constant(self.rule):
            return 1.0
        scale = self.scale_by(keras_variables.value_in_scopes)
        if any(value is None for value in scale):
            return None
        return self._place_of(scale)

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
            of_data = placing.stays(is_data(), before.consecutive_skips)
        after = before.after(rule, applied, bad, of_data)
        every = map(tree.flatten, (self.held, before, after))
        for variable, old, new in zip(*every, strict=True):
            keras_variables.assign_new(variable, old, new)
        moves = rule is not None and not rules.is_constant(rule)
        if moves and placing.variables_of(updated):
            places = self._place_of(before.scale), self._place_of(after.scale)
            placing.tell(self, updated, *places)

    def _place_of(self, scale: Any) -> Any:
        ratio = self.rule.current(scale) / self.rule.init()[0]
        return keras_variables.select(ratio < 1.0, ratio, ratio * placing.FREE)


class Counts:
    """Mixin: what a state has counted; reading it waits for the device."""

    _state: State

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps."""
        return int(on_host(self._counted().skipped_steps))

    @property
    def consecutive_skips(self) -> int:
        """The number of skipped steps since the last applied one."""
        return int(on_host(self._counted().consecutive_skips))

    @property
    def overflow_counts(self) -> dict[str, int]:
        """Skipped steps per variable, by its path."""
        counts = self._counted().overflow_counts
        if counts is None:
            return {}
        numbers = on_host(counts).tolist()
        return dict(zip(self._state.paths, numbers, strict=True))

    def warn(self, applied: Any) -> None:
        """Warns of the eighth skip in a row of an eager loop."""
        # The line after an epoch of `fit` says more.
        if applied is False and context.block.get().step is None:
            standstill.warn_of_eighth(
                self._state.name, self.consecutive_skips, self.overflow_counts
            )

    def _counted(self) -> Values:
        """Returns the variables, after all steps so far."""
        return self._state.held


# The counts of optimizers that nothing wraps.
unwrapped: weakref.WeakKeyDictionary[Any, Counts] = weakref.WeakKeyDictionary()


def counts_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what has counted an optimizer's skipped steps, or `None`."""
    is_wrapper = isinstance(optimizer, Counts)
    return optimizer if is_wrapper else unwrapped.get(optimizer)


def counts_of_model(model: keras.Model) -> list[Any]:
    """Lists the counts of a model's optimizers; a GAN may have several."""
    found = [
        counts_of(value)
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
    ]
    return [counts for counts in found if counts is not None]


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
