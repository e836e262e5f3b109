"""One optimizer step under JAX: values go in, the next ones come out."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import keras
from keras import ops

from tfmix._keras import compilation, optimizers
from tfmix.step import finite, unscale
from tfmix.step.state import Settings, State


def step(
    state: State,
    grads: Sequence,
    weights: list,
    slots: list,
    settings: Settings,
    unscaled: bool,
    is_data: Any = False,
) -> tuple[State, list, list]:
    """Unscales and checks gradients, and applies them or skips the step.

    Args:
        state: From before the step.
        grads: A gradient, or `None`, for each variable of the settings.
        weights: What the variables of the build hold; they themselves are not
            read.
        slots: What the inner optimizer's variables hold.
        settings: What stays the same.
        unscaled: Whether the gradients are true ones already.
        is_data: Bool or boolean scalar tensor, whether gradients that are not
            finite come from data or a loss that are not.

    Returns:
        The state after the step, and the new weights and slots.
    """
    variables, inner = settings.variables, settings.inner
    scale = None if unscaled else settings.rule.current(state.scale)
    true = unscale.true_gradients(grads, variables, scale)
    bad = _not_finite(true if settings.rule.may_enlarge else list(grads))
    applied = ops.logical_not(ops.any(bad))
    if not (traced := isinstance(applied, jax.core.Tracer)):
        applied = bool(applied)
    keeps_norm = state.gradient_norm is not None
    norm = unscale.norm(true, variables) if keeps_norm else None
    state = state.after(settings, applied, bad, norm, is_data)
    if not traced and not applied:
        return state, weights, slots
    built = variables[: len(weights)]
    used, before = built + inner.variables, weights + slots
    with keras.StatelessScope(state_mapping=zip(used, before, strict=True)):
        selection = optimizers.Selection(applied, used)
    with selection.of(inner) if traced else contextlib.nullcontext():
        if settings.repeated:
            mapping = zip(used, before, strict=True)
            with keras.StatelessScope(state_mapping=mapping) as scope:
                inner.apply(true, variables)
            after = [scope.get_current_value(variable) for variable in used]
        else:
            new = inner.stateless_apply(slots, true, weights)
            after = [*new[0], *new[1]]
    if traced:
        after = _selected(applied, selection, used, before, after)
    count = len(weights)
    return state, after[:count], after[count:]


def _selected(
    applied: Any,
    selection: optimizers.Selection,
    variables: list,
    before: list,
    after: list,
) -> list:
    """Selects what the optimizer has not: values it assigned by itself."""
    with keras.StatelessScope(state_mapping=zip(variables, after, strict=True)):
        is_made = [selection.is_made(variable) for variable in variables]
    return [
        new if made else jax.numpy.where(applied, new, old)
        for made, new, old in zip(is_made, after, before, strict=True)
    ]


@jax.jit
def _not_finite(grads: list) -> Any:
    # Compiled for eager steps, too, where every operation costs. Where XLA
    # looks through the flags, it may order a step for more memory.
    return compilation.kept_apart(finite.not_finite(grads))
