"""Says whether losses are multiplied by a loss scale, and gradients divided.

A model under a tfmix policy scales its gradients inside. An optimizer that has
only variables of such models leaves losses and gradients alone. Any other
multiplies losses by its loss scale, and divides the gradients.
"""

from typing import Any

from tfmix import _users_code
from tfmix.loss_scaling import rules, step_outcome


class Unscaled:
    """Losses keep their values, because the models scale their gradients."""

    are_scaled = False

    def note(self, optimizer: Any) -> None:
        """Notes that an optimizer has scaled a loss, which this one cannot."""

    def are_gradients_scaled(self, optimizer: Any, warns: bool = False) -> bool:
        """Returns whether the gradients are those of a scaled loss.

        They are in a step that scaled its loss before the optimizer knew its
        variables.
        """
        return _has_scaled_in_step(optimizer) is True


class Scaled:
    """Losses are multiplied by the loss scale."""

    are_scaled = True

    def __init__(self) -> None:
        self._has_scaled = False

    def note(self, optimizer: Any) -> None:
        """Notes that an optimizer has scaled a loss."""
        self._has_scaled = True
        if (step := step_outcome.around()) is not None:
            step.scaled.add(id(optimizer))

    def are_gradients_scaled(self, optimizer: Any, warns: bool = False) -> bool:
        """Returns whether the gradients are those of a scaled loss.

        In a model's train step, they are if the step has scaled its loss.

        Args:
            optimizer: The optimizer.
            warns: Whether to warn if no loss was ever scaled.
        """
        in_step = _has_scaled_in_step(optimizer)
        if in_step is not None:
            return in_step
        if warns and not self._has_scaled:
            self._has_scaled = True
            rule = optimizer.rule
            if not (rules.is_constant(rule) and rule.lowest_scale == 1.0):
                _users_code.warn(_NOT_SCALED)
        return True


def _has_scaled_in_step(optimizer: Any) -> bool | None:
    """Returns whether the step around has scaled a loss, `None` if none is."""
    step = step_outcome.around()
    return None if step is None else id(optimizer) in step.scaled


_NOT_SCALED = (
    "The gradients are divided by the loss scale, but the loss was not "
    "multiplied by it, so every update is too small by that factor. Take the "
    "gradients of the scaled loss: `scaled = optimizer.scale_loss(loss)` "
    "inside the tape, then `tape.gradient(scaled, ...)`; or, if the gradients "
    "are those of the loss, write optimizer.apply(grads, variables, "
    "unscaled=True)."
)
