"""One optimizer step under TensorFlow: sum, unscale, check, apply or skip."""

from typing import Any

import tensorflow as tf

from tfmix._keras import compilation, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.scaling.step import finite, replicas, unscale


def apply(optimizer: Any, grads: list, variables: list, unscaled: bool) -> Any:
    """Does the work of `LossScaleOptimizer.apply`, for a built one."""
    replicas.check_replica_context()
    used = optimizer.variables + optimizer.model_variables
    with replicas.one_replica(used):
        state = optimizer.state()
        current = optimizer.rule.current(state)
    scale = None if unscaled else current
    # In 16 bit true gradients may be too small to be summed.
    narrow = optimizer.reduce_dtype is not None
    factor = current if narrow and unscaled else None
    grads = replicas.sum_gradients(
        grads, variables, optimizer.reduce_dtype, factor
    )
    with replicas.one_replica(used, optimizer):
        run = _update_or_restore if compilation.by_xla() else _update_or_skip
        return run(optimizer, state, grads, variables, scale)


def _update(optimizer: Any, true: list, variables: list) -> None:
    local = [keras_variables.local(variable) for variable in variables]
    optimizer.inner_optimizer.apply(true, local)


def _update_or_skip(
    optimizer: Any, state: Any, grads: list, variables: list, scale: Any
) -> Any:
    """Updates if all gradients are finite, where a conditional skips work."""
    # In float32 before sparse rows are added up.
    grads = unscale.true_gradients(grads, variables, None)

    def true_gradients() -> list:
        return unscale.true_gradients(grads, variables, scale)

    # No division by 1 or more makes an infinity.
    may_grow = optimizer.rule.lowest_scale < 1
    bad = finite.not_finite(true_gradients() if may_grow else grads)

    def apply_step() -> Any:
        true = true_gradients()
        _update(optimizer, true, variables)
        optimizer.record(state, True)
        optimizer.note_gradient_norm(true, variables, True)
        return tf.constant(True)

    def skip_step() -> Any:
        optimizer.record(state, False)
        optimizer.count_overflows(bad, variables)
        return tf.constant(False)

    return tf.cond(tf.reduce_any(bad), skip_step, apply_step)


def _update_or_restore(
    optimizer: Any, state: Any, grads: list, variables: list, scale: Any
) -> Any:
    """Updates in any case, and selects the old values if it has to be skipped.

    A kernel that updates selects as well, at no cost. A conditional would make
    a GPU wait for the host, and copy every slot.
    """
    true = unscale.true_gradients(grads, variables, scale)
    # No division by 1 or more makes an infinity.
    bad = finite.not_finite(true if optimizer.rule.lowest_scale < 1 else grads)
    applied = tf.logical_not(tf.reduce_any(bad))
    inner = optimizer.inner_optimizer
    used = optimizer.model_variables + inner.variables
    before = [tf.identity(variable.value) for variable in used]
    optimizer.note_gradient_norm(true, variables, applied)
    selection = optimizers.Selection(applied, used)
    sparse = any(map(finite.is_sparse, true))
    if sparse and optimizers.divides_gradients(inner):
        # XLA asks for the shape of the quotient at compile time, and so for all
        # that its conditional reads: nothing of `applied` may be among it.
        _update(optimizer, true, variables)
    else:
        with selection.of(inner):
            true = [_nowhere_unless(applied, gradient) for gradient in true]
            _update(optimizer, true, variables)
    for variable, old in zip(used, before, strict=True):
        if not selection.is_made(variable):
            variable.assign(tf.where(applied, variable, old))
    optimizer.record(state, applied)
    optimizer.count_overflows(bad, variables)
    return applied


def _nowhere_unless(applied: Any, gradient: Any) -> Any:
    """Lets a sparse gradient have no row to change, unless it is applied."""
    # XLA leaves rows out that are not there.
    if not finite.is_sparse(gradient):
        return gradient
    outside = tf.cast(gradient.dense_shape[0], gradient.indices.dtype)
    rows = tf.where(applied, gradient.indices, outside)
    return tf.IndexedSlices(gradient.values, rows, gradient.dense_shape)
