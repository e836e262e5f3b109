"""The variables of the loss scale and the counters, and what moves them."""

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _arguments
from tfmix.scaling import rules, storage
from tfmix.variables import delegating

# How the variables of a loss scale's state are called in Keras's own class,
# so that a checkpoint written by either can be read by tfmix.
_KERAS_NAMES = {"scale": "dynamic_scale", "good_steps": "step_counter"}


class KeepsScaleState(
    delegating.DelegatesToInner, keras.optimizers.LossScaleOptimizer
):
    """A wrapper that holds a rule's state and counts what was skipped."""

    built: bool

    @property
    def loss_scale(self) -> float:
        """The loss scale in force; reading it waits for the device."""
        # Of the variables, not of their values: in the scope of a strategy
        # NumPy cannot read the value of a mirrored one.
        state = self._state_type(*map(_host, self._state_variables()))
        return float(self.rule.current(state))

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        wanted = np.float32(_arguments.positive("loss_scale", value))
        state = self.rule.init()._replace(scale=wanted)
        if float(self.rule.current(state)) != wanted:
            raise ValueError(
                f"{self.rule!r} does not allow this loss scale. "
                f"Received: loss_scale={value!r}."
            )
        self._assign_state(state)

    @property
    def skipped_steps(self) -> int:
        """Steps not applied so far; reading it waits for the device."""
        return int(_host(self._skipped_steps))

    @property
    def consecutive_skips(self) -> int:
        """Steps not applied since the last that was; waits for the device."""
        return int(_host(self._consecutive_skips))

    @property
    def overflow_counts(self) -> dict[str, int]:
        """Skipped steps per variable; reading it waits for the device."""
        if not self.built:
            return {}
        counts = _host(self._overflow_counts).tolist()
        paths = [_path(variable) for variable in self.model_variables]
        return dict(zip(paths, counts, strict=True))

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the inner optimizer's slots and the overflow counts.

        Args:
            variables: The model's trainable variables.
        """
        if self.built:
            return
        variables = list(variables)
        self.inner_optimizer.build(variables)
        self._overflow_counts = self._counter(
            "overflow_counts", shape=(len(variables),)
        )
        # In place: Keras would take an assigned list for its own variables.
        self._trainable_variables.extend(variables)
        for position, variable in enumerate(variables):
            key = self._var_key(variable)
            self._trainable_variables_indices[key] = position
        self.built = True

    @property
    def own_variables(self) -> list[Any]:
        """The variables of the loss scale and its counters."""
        return list(self._variables)

    @property
    def model_variables(self) -> list[Any]:
        """The model's variables that the optimizer was built with."""
        return list(self._trainable_variables)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all of `optimizer.variables`, or none.

        Args:
            weights: One array for each of `optimizer.variables`.

        Raises:
            ValueError: If the optimizer is not built, or a count or a shape
                differs.
        """
        if not self.built:
            raise ValueError(
                "`set_weights` needs a built optimizer. Call "
                "`optimizer.build(model.trainable_variables)` first."
            )
        storage.assign_all(self.variables, weights)

    def save_own_variables(self, store: Any) -> None:
        """Writes the whole state, the inner optimizer's included.

        Before it is built the inner one has settings alone, which its config
        holds as well.
        """
        inner = self.inner_optimizer.variables if self.built else ()
        storage.save(store, self.own_variables, inner)

    def load_own_variables(self, store: Any) -> None:
        """Reads the whole state; also one that Keras's class has written.

        Before the optimizer is built there is nothing to read it into, and a
        file of weights may hold none: that is said in a warning, as in Keras,
        so that weights can be loaded into any model.

        Raises:
            ValueError: If it does not fit. Nothing is changed then.
        """
        if not self.built or not store.keys():
            storage.warn_of_nothing_restored(self)
            return
        storage.load(store, self.own_variables, self.inner_optimizer.variables)

    def state(self) -> Any:
        """Returns the rule's state as its named tuple of variables' values."""
        return self._state_type(*(v.value for v in self._state_variables()))

    def record(self, state: Any, applied: bool) -> None:
        """Moves the loss scale and the counters on by one step.

        Args:
            state: What `state()` returned before the step.
            applied: Bool, known because both outcomes are traced apart.
        """
        # Of optimizers that share a scale each one lowers it, one raises it:
        # else the growth window would be over after half its steps.
        if self._leads or not applied:
            self._assign_state(self.rule.update(state, applied))
        if applied:
            self._consecutive_skips.assign(0)
        else:
            self._consecutive_skips.assign(self._consecutive_skips + 1)
            self._skipped_steps.assign(self._skipped_steps + 1)

    def count_overflows(self, bad: Any, variables: Sequence[Any]) -> None:
        """Counts, on a skip, the variables whose gradient is not finite.

        Args:
            bad: Boolean vector, one flag for each variable.
            variables: The variables of the step.
        """
        counts = self._overflow_counts
        bad = ops.cast(bad, counts.dtype)
        indices = self._trainable_variables_indices
        rows = [indices[self._var_key(variable)] for variable in variables]
        if rows != list(range(len(indices))):
            # A step on some of the variables, or in another order.
            column = np.reshape(rows, (-1, 1))
            bad = ops.scatter(column, bad, tuple(counts.shape))
        counts.assign(counts + bad)

    def last_step_applied(self) -> Any:
        """Returns a boolean scalar tensor; nothing is copied to the host."""
        return ops.logical_not(self.skipped_in_a_row(1))

    def skipped_in_a_row(self, steps: int) -> Any:
        """Returns a boolean scalar tensor: so many skips or more, just now?"""
        return ops.greater_equal(self._consecutive_skips.value, steps)

    def create_state(
        self, rule: rules.LossScale, leader: "KeepsScaleState | None"
    ) -> None:
        """Creates a variable for each number that the rule remembers.

        They exist from the start: a function that scales the loss and is
        compiled before the first step must read the live scale.

        Args:
            rule: The rule.
            leader: The optimizer whose variables are used instead, or `None`.
        """
        self.rule = rule
        self._leads = leader is None
        initial = rule.init()
        self._state_type = type(initial)
        # Keras's order, so that its files can be read by position.
        fields = sorted(initial._fields, key=lambda name: name != "good_steps")
        for field in fields:
            if leader is None:
                variable = self._number(field, getattr(initial, field))
            else:
                variable = vars(leader)[_attribute(field)]
            # Keras tracks what is assigned, and what it has made only once.
            setattr(self, _attribute(field), variable)
        self._skipped_steps = self._counter("skipped_steps")
        self._consecutive_skips = self._counter("consecutive_skips")

    def _number(self, field: str, value: Any) -> Any:
        return self.add_variable(
            shape=np.shape(value),
            dtype="int" if isinstance(value, numbers.Integral) else "float32",
            initializer=keras.initializers.Constant(value),
            name=_KERAS_NAMES.get(field, field),
        )

    def _counter(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        return self.add_variable(
            shape=shape, dtype="int32", initializer="zeros", name=name
        )

    def _state_variables(self) -> list[Any]:
        fields = self._state_type._fields
        return [vars(self)[_attribute(field)] for field in fields]

    def _assign_state(self, state: Any) -> None:
        for variable, value in zip(self._state_variables(), state, strict=True):
            variable.assign(value)


def _attribute(field: str) -> str:
    return _KERAS_NAMES.get(field, f"_loss_scale_{field}")


def _host(value: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(value))


def _path(variable: Any) -> str:
    return getattr(variable, "path", variable.name)
