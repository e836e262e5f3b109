"""One optimizer step under JAX: state goes in, the next state comes out."""

import functools
from typing import Any

import jax
import keras
from keras import ops

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
    true = unscale.one_by_one(grads, variables, scale)
    # No division by 1 or more makes an infinity.
    bad = _not_finite(true if optimizer.rule.lowest_scale < 1 else grads)
    applied = ops.logical_not(ops.any(bad))
    if not (traced := isinstance(applied, jax.core.Tracer)):
        applied = bool(applied)
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.record(state, applied)
        optimizer.count_overflows(bad, variables)
    own = [scope.get_current_value(v) for v in optimizer.own_variables]
    if not traced and not applied:
        return list(trainable_values), own + inner_values
    new_trainable, new_inner = optimizer.inner_optimizer.stateless_apply(
        inner_values, true, trainable_values
    )
    if traced:
        # A kernel that updates selects as well, at no cost. A conditional
        # would make a GPU wait for the host, and copy every slot.
        keep = functools.partial(_new_if, applied)
        new_trainable = jax.tree.map(keep, new_trainable, trainable_values)
        new_inner = jax.tree.map(keep, new_inner, inner_values)
    return new_trainable, own + new_inner


def _new_if(applied: Any, new: Any, old: Any) -> Any:
    return old if new is old else jax.numpy.where(applied, new, old)


# Compiled for eager steps, too, where every operation costs.
_not_finite = jax.jit(finite.not_finite)


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
