"""One optimizer step under JAX: state goes in, the next state comes out."""

import functools
from typing import Any

import jax
import keras
from keras import ops

from tfmix._keras import compilation
from tfmix.scaling.step import unscale


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
    bad = _not_finite(grads, variables, scale, optimizer.rule.lowest_scale)
    is_finite = ops.logical_not(ops.any(bad))

    def own_values(applied: bool) -> list:
        with keras.StatelessScope(state_mapping=mapping) as scope:
            optimizer.record(state, applied)
            if not applied:
                kept = compilation.kept_apart(bad)
                optimizer.count_overflows(kept, variables)
        return [scope.get_current_value(v) for v in optimizer.own_variables]

    def apply_step() -> tuple[list, list]:
        true = unscale.divided(unscale.apart(grads, variables), scale)
        new_trainable, new_inner = optimizer.inner_optimizer.stateless_apply(
            inner_values, unscale.parts(true, len(grads)), trainable_values
        )
        return new_trainable, own_values(True) + new_inner

    def skip_step() -> tuple[list, list]:
        return list(trainable_values), own_values(False) + inner_values

    if not isinstance(is_finite, jax.core.Tracer):
        # An eager step: the branch is known, and need not be compiled.
        return apply_step() if is_finite else skip_step()
    if compilation.for_cpu():
        return jax.lax.cond(is_finite, apply_step, skip_step)
    # On an accelerator a conditional waits for the host to read its flag.
    where = functools.partial(jax.numpy.where, is_finite)
    return jax.tree.map(
        lambda new, old: old if new is old else where(new, old),
        apply_step(),
        skip_step(),
    )


def _not_finite(grads: list, variables: list, scale: Any, lowest: float) -> Any:
    """Returns which true gradients are not finite, as a boolean vector."""
    # No division by 1 or more makes an infinity: the scaled gradients, which
    # are there already, are checked then. They are joined for the check alone,
    # since to take them apart again costs kernels.
    joined = unscale.joined(grads, variables)
    if lowest < 1:
        joined = unscale.divided(joined, scale)
    return unscale.not_finite(joined, len(grads))


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
