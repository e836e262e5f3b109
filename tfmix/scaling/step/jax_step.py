"""One optimizer step under JAX: state goes in, the next state comes out."""

import contextlib
from typing import Any

import jax
import keras
from keras import ops

from tfmix._keras import compilation, optimizers
from tfmix.scaling.step import finite, unscale


def stateless_apply(
    optimizer: Any,
    optimizer_values: list,
    grads: list,
    trainable_values: list,
    unscaled: bool,
) -> tuple[list, list]:
    """Does the work of `LossScaleOptimizer.stateless_apply`."""
    variables = optimizer.model_variables
    mapping = list(zip(optimizer.variables, optimizer_values, strict=True))
    inner_values = optimizer_values[len(optimizer.own_variables) :]
    with keras.StatelessScope(state_mapping=mapping):
        state = optimizer.state()
        scale = None if unscaled else optimizer.rule.current(state)
    true = unscale.true_gradients(grads, variables, scale)
    # No division by 1 or more makes an infinity.
    bad = _not_finite(true if optimizer.rule.lowest_scale < 1 else grads)
    applied = ops.logical_not(ops.any(bad))
    if not (traced := isinstance(applied, jax.core.Tracer)):
        applied = bool(applied)
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.record(state, applied)
        optimizer.count_overflows(bad, variables)
        optimizer.note_gradient_norm(true, variables, applied)
    own = [scope.get_current_value(v) for v in optimizer.own_variables]
    if not traced and not applied:
        return list(trainable_values), own + inner_values
    inner = optimizer.inner_optimizer
    used = variables + inner.variables
    before = list(trainable_values) + inner_values
    with keras.StatelessScope(state_mapping=zip(used, before, strict=True)):
        selection = optimizers.Selection(applied, used)
    with selection.of(inner) if traced else contextlib.nullcontext():
        new = inner.stateless_apply(inner_values, true, trainable_values)
    after = [*new[0], *new[1]]
    if traced:
        after = _selected(applied, selection, used, before, after)
    return after[: len(variables)], own + after[len(variables) :]


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


def apply(optimizer: Any, grads: list, variables: list, unscaled: bool) -> Any:
    """Does the same on the variables; says whether the step was applied."""
    by_variable = dict(zip(map(id, variables), grads, strict=True))
    model_variables = optimizer.model_variables
    new_trainable, new_optimizer = stateless_apply(
        optimizer,
        [variable.value for variable in optimizer.variables],
        [by_variable.get(id(variable)) for variable in model_variables],
        [variable.value for variable in model_variables],
        unscaled,
    )
    changed = model_variables + optimizer.variables
    values = new_trainable + new_optimizer
    for variable, value in zip(changed, values, strict=True):
        variable.assign(value)
    return optimizer.last_step_applied()
