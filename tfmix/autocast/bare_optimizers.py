"""Makes unwrapped optimizers skip the steps that are not finite.

This protects loops without `compile`, and models with several optimizers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _messages
from tfmix._keras import files, layers, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import rules, state
from tfmix.optimizers import sixteen_bit_optimizer
from tfmix.step import finite, guard, replicas

# The arguments of these methods.
_ORDER = "grads", "trainable_variables"
_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


class _HostValue:
    """A value on the host, which no step that JAX compiles is given."""

    def __init__(self, value: Any, dtype: str) -> None:
        self.value = self._value = np.asarray(value, dtype)

    def numpy(self) -> np.ndarray:
        """Returns the value."""
        return self.value

    def assign(self, value: Any) -> None:
        """Replaces the value."""
        self.value = self._value = np.asarray(value, self.value.dtype)


class Skips(state.Counts):
    """Counts the skipped steps of one optimizer, like `LossScaleOptimizer`.

    TensorFlow counts them in variables that a SavedModel saves with the
    optimizer's own. A function that JAX compiles can only change the variables
    that it is given, so JAX counts eager steps only.
    """

    # Losses are not scaled: the state's scale moves gradients inside models.
    rule = rules.NoLossScale()
    loss_scale = 1.0
    # It is not known why a step was skipped.
    counts_bad_data = False

    def __init__(self, optimizer: Any, variables: Sequence) -> None:
        self.applies = optimizers.applies(optimizer)
        self.variables: list[keras.Variable] = []
        self._state = state.State(rules.DynamicLossScale(), self._add)
        self._state.build(optimizer.name, variables)
        if _ON_TENSORFLOW:
            files.save_with(optimizer, self.variables)

    def count(
        self, applied: Any, bad: Any, grads: Sequence, to: Sequence
    ) -> None:
        """Counts a step.

        Args:
            applied: Bool or boolean scalar tensor, whether it was applied.
            bad: Boolean vector, the variables with a gradient not finite.
            grads: The gradients, summed over replicas.
            to: The variable of each.
        """
        if not (_ON_TENSORFLOW or isinstance(applied, bool)):
            return

        def is_data() -> Any:
            return finite.blames_data(grads, to, ops.logical_or)

        moves = not _ON_TENSORFLOW or state.place_variables(to)
        self._state.count(applied, bad, to, is_data if moves else None)
        self.warn(applied)

    def _add(self, name: str, value: Any, dtype: str) -> Any:
        if not _ON_TENSORFLOW:
            return _HostValue(value, dtype)
        variable = keras.Variable(
            value, dtype=dtype, trainable=False, autocast=False, name=name
        )
        self.variables.append(variable)
        return variable


def make_apply(original: Callable) -> Callable:
    """Returns the `apply` of optimizers that nothing has wrapped."""

    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_call = functools.partial(layers.argument, _ORDER, args, kwargs)
        grads, variables = of_call("grads", ()), of_call("trainable_variables")
        is_mine = not (
            isinstance(self, optimizers.KerasScaler) or self.loss_scale_factor
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
    if optimizer not in state.unwrapped:
        built = optimizer.built and optimizers.remembered(optimizer)
        first = list(built or variables)
        build = functools.partial(_build, optimizer, first)
        replicas.once_for_all(build, first)
    known = optimizers.remembered(optimizer)
    these = list(known if variables is None else variables)
    guard.note_update(these)
    skips: Any = state.unwrapped[optimizer]
    applied = finite.apply_step(
        optimizer,
        grads,
        these,
        functools.partial(original, optimizer),
        assigned=[*optimizer.variables, *known],
        counters=[*skips.variables, *state.place_variables(these)],
        count=functools.partial(skips.count, to=these),
    )
    guard.report(lambda: applied)


def _build(optimizer: Any, variables: Sequence) -> None:
    if not optimizer.built:
        optimizer.build(variables)
    state.unwrapped[optimizer] = Skips(optimizer, variables)


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
