"""Whether gradients that an optimizer is given have to be divided."""

import contextlib
import contextvars
from collections.abc import Sequence
from typing import Any

from keras import tree

from tfmix import _context_values, _users_code
from tfmix._keras import compilation, global_state

# Notes on tensors: a loss that was scaled; a gradient that is the result of a
# division, or that was given to one.
_LOSS, _GRADIENT = "_tfmix_scaled_loss", "_tfmix_gradient"
_TRUE, _SCALED = "true", "scaled"
# The scales that a loss was multiplied by in the train step around the caller,
# by the `id` of their `ScaleInUse`; `None` outside of one.
_scaled_in_step: contextvars.ContextVar[set[int] | None] = (
    contextvars.ContextVar("tfmix_scaled_in_step", default=None)
)


def train_step() -> contextlib.AbstractContextManager[None]:
    """Lets `apply` take true gradients, unless the step around it scales."""
    return _context_values.set_to(_scaled_in_step, set())


def in_train_step() -> bool:
    """Says whether a train step of a model is around the caller."""
    return _scaled_in_step.get() is not None


class ScaleInUse:
    """Whether losses are multiplied by a scale, for all who share it."""

    in_loops = False

    def note(self) -> None:
        """Notes that a loss is multiplied by the scale."""
        self.in_loops = self.in_loops or _scaled_in_step.get() is None
        self.note_in_step()

    def note_in_step(self) -> None:
        """Notes that a train step, if one is around, multiplies its loss."""
        scaled_in_step = _scaled_in_step.get()
        if scaled_in_step is not None:
            scaled_in_step.add(id(self))

    def in_step(self) -> bool | None:
        """Says whether the train step around scales; `None` outside of one."""
        scaled_in_step = _scaled_in_step.get()
        return None if scaled_in_step is None else id(self) in scaled_in_step


class GivenGradients:
    """What one optimizer knows of the gradients that it is given.

    Args:
        in_use: Of its loss scale, whose sharers may scale each other's losses.
        is_one: Bool, whether the scale is 1 for good and divides nothing.
    """

    def __init__(self, in_use: ScaleInUse, is_one: bool) -> None:
        self.in_use, self._is_one = in_use, is_one
        #: Whether `compile` put the optimizer on, so that a loop may know
        #: nothing of it.
        self.unasked = False
        self._told = False
        # What `apply_gradients` is given, and whether it was given scaled ones.
        self._next_are_true = self._applied_scaled = False
        # The trace in which gradients were divided that may yet be applied.
        self._divided_in: Any = None

    def begin(self) -> None:
        """Begins a step by the names of Keras: its gradients are scaled."""
        self._next_are_true, self._divided_in = False, None

    def scaling(self, loss: Any) -> None:
        """Notes that a loss is scaled, which is not to be scaled again."""
        if any(global_state.note(leaf, _LOSS) for leaf in tree.flatten(loss)):
            raise ValueError(
                "This loss was scaled already, and would be scaled twice. "
                f"Received: loss={loss!r}. Call `scale_loss` once, on the "
                "loss itself."
            )
        self.in_use.note()

    def scaled(self, loss: Any) -> None:
        """Notes on a loss that it was scaled."""
        global_state.put_note(loss, _LOSS, True)

    def dividing(self, grads: Sequence, *, by_old_name: bool) -> None:
        """Notes that gradients are divided, which is not to be done again."""
        if by_old_name and self._applied_scaled:
            raise ValueError(
                "`apply_gradients` was called with scaled gradients before, "
                "so that a step already compiled would divide these once "
                "more. To log or to clip, write `optimizer.unscale_gradients("
                f"grads)`. {_APPLY}"
            )
        if _TRUE in _notes(grads):
            raise ValueError(
                "These gradients were divided by the loss scale already, and "
                "would be divided twice. Call `unscale_gradients` once, on "
                "what the gradient tape or jax.grad returns."
            )
        if by_old_name:
            self._next_are_true = True
        else:
            self._divided_in = compilation.trace()

    def divided(self, before: Sequence, after: Sequence) -> None:
        """Notes on gradients that they were divided, or came of that."""
        for given, true in zip(before, after, strict=True):
            if true is not given:
                global_state.put_note(given, _GRADIENT, _SCALED)
                global_state.put_note(true, _GRADIENT, _TRUE)

    def of_old_name(self, grads: Sequence, in_guarded_step: bool) -> bool:
        """Says whether `apply_gradients` is given true gradients."""
        notes = _notes(grads)
        unscaled = self._next_are_true or _TRUE in notes
        if not (unscaled or notes) and self._divided_in is not None:
            raise ValueError(
                "`unscale_gradients` was called in this step, and "
                "`apply_gradients` cannot tell scaled gradients from "
                f"divided ones. {_APPLY}"
            )
        if not unscaled and not in_guarded_step:
            self._applied_scaled = True
        return unscaled

    def are_true(self, grads: Sequence, unscaled: bool) -> bool:
        """Says whether `apply` is given true gradients.

        Args:
            grads: The gradients.
            unscaled: What the caller says of them; refused if surely wrong.
        """
        notes = _notes(grads)
        if not unscaled and _TRUE in notes:
            raise ValueError(
                "These gradients come from `unscale_gradients`, and would be "
                "divided by the loss scale twice. Write optimizer.apply(grads, "
                "variables, unscaled=True)."
            )
        if unscaled and _SCALED in notes:
            raise ValueError(
                "These gradients were given to `unscale_gradients` and are "
                "still scaled, so the update would be too large by the loss "
                "scale. Give its result to `apply`, or leave out unscaled=True."
            )
        divided_in, self._divided_in = self._divided_in, None
        if unscaled or self.nobody_scales():
            return True
        new = _SCALED not in notes and divided_in is not None
        if new and divided_in == compilation.trace():
            _users_code.warn(
                "`unscale_gradients` was called in this step, and now other "
                "gradients than it was given are divided by the loss scale. "
                "That is right for sums of what it was given; if they were "
                "made of its result, as by clipping, write "
                "optimizer.apply(grads, variables, unscaled=True)."
            )
        return False

    def nobody_scales(self) -> bool:
        """Says whether gradients are true ones: nobody scaled their loss."""
        in_step = self.in_use.in_step()
        if in_step is not None:
            return not in_step
        if self.in_use.in_loops or self._is_one:
            return False
        if not self.unasked and not self._told:
            self._told = True
            _users_code.warn(
                "The gradients are divided by the loss scale, but the loss was "
                "not multiplied by it, so every update is too small by that "
                "factor. Take the gradients of the scaled loss: `scaled = "
                "optimizer.scale_loss(loss)` inside the tape, then "
                "`tape.gradient(scaled, ...)`; or, if gradients need no "
                "scaling, as those of a Keras model under a tfmix policy, "
                "write optimizer.apply(grads, variables, unscaled=True)."
            )
        return self.unasked


def _notes(grads: Sequence) -> set[str]:
    """Returns what is noted on any of the gradients."""
    return {global_state.note(grad, _GRADIENT) for grad in grads} - {None}


_APPLY = (
    "Write `optimizer.apply(grads, variables)` for scaled gradients, or "
    "`optimizer.apply(grads, variables, unscaled=True)` for those that "
    "`unscale_gradients` returned."
)
