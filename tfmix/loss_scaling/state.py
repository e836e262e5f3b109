"""What a step of the loss-scale optimizer reads and moves on: pure values."""

import numbers
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops


class Settings(NamedTuple):
    """What stays the same from step to step.

    Attributes:
        rule: The rule of the loss scale, a `tfmix.loss_scaling.LossScale`.
        inner: The optimizer that updates.
        variables: The model's variables that it was built with, and after
            them again those that are given a second gradient.
        repeated: The places of the latter among the former.
    """

    rule: Any
    inner: keras.optimizers.Optimizer
    variables: list[keras.Variable]
    repeated: tuple[int, ...] = ()


class State(NamedTuple):
    """What a step moves on.

    Attributes:
        scale: The rule's state, a named tuple of scalars.
        skipped_steps: Int32 scalar, steps not applied so far.
        consecutive_skips: Int32 scalar, those since the last that was.
        overflow_counts: Int32 vector, of skipped steps in which the gradient
            of each variable was not finite.
        gradient_norm: Float32 scalar, of the last applied step's gradients;
            `None` if it is not kept.
    """

    scale: Any
    skipped_steps: Any
    consecutive_skips: Any
    overflow_counts: Any
    gradient_norm: Any = None

    def after(
        self,
        settings: Settings,
        applied: Any,
        bad: Any,
        norm: Any,
        is_data: Any,
    ) -> "State":
        """Returns the state after a step.

        Args:
            settings: Of the optimizer.
            applied: Bool or boolean scalar tensor, whether it was applied.
            bad: Boolean vector, the variables with a gradient not finite.
            norm: Float32 scalar, of the true gradients; `None` if not kept.
            is_data: Bool or boolean scalar tensor, whether the step is not
                applied because the data or the loss is not finite. No scale
                helps there, so that the rule does not move.
        """
        bad = _by_variable(bad, settings)
        scale = settings.rule.update(self.scale, applied)
        if is_data is not False:
            scale = _select_all(is_data, self.scale, scale)
        if norm is not None:
            norm = select(applied, norm, self.gradient_norm)
        return State(
            scale=scale,
            skipped_steps=self.skipped_steps + select(applied, 0, 1),
            consecutive_skips=select(
                applied,
                ops.zeros_like(self.consecutive_skips),
                self.consecutive_skips + 1,
            ),
            overflow_counts=self.overflow_counts + ops.cast(bad, "int32"),
            gradient_norm=norm,
        )


def _by_variable(bad: Any, settings: Settings) -> Any:
    """Joins the flags of all gradients that a variable is given."""
    if not settings.repeated:
        return bad
    count = len(settings.variables) - len(settings.repeated)
    own = bad[:count]
    for place, row in enumerate(settings.repeated):
        is_row = np.arange(count) == row
        again = ops.logical_and(is_row, bad[count + place])
        own = ops.logical_or(own, again)
    return own


def _select_all(condition: Any, if_true: Any, if_false: Any) -> Any:
    pairs = zip(if_true, if_false, strict=True)
    return type(if_true)(*(select(condition, *pair) for pair in pairs))


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Returns one of two values, numbers or scalar tensors."""
    if is_number(condition):
        return if_true if condition else if_false
    return ops.where(condition, if_true, if_false)


def is_number(value: Any) -> bool:
    """Returns whether a value is known now, not a tensor to come."""
    return isinstance(value, numbers.Number | np.generic | np.ndarray)
