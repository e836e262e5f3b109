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
    early: frozenset[int] = frozenset()
    if optimizer.reduce_dtype is None:
        grads, early = _divided_early(grads, variables, scale)
        grads = replicas.sum_gradients(grads, variables)
    else:
        # True gradients may be too small for 16 bit.
        factor = current if unscaled else None
        dtype = optimizer.reduce_dtype
        grads = replicas.sum_gradients(grads, variables, dtype, factor)
    with replicas.one_replica(used, optimizer):
        if compilation.by_xla():
            return _update_or_restore(optimizer, state, grads, variables, scale)
        step = _Step(grads, variables, scale, early)

        def apply_step() -> Any:
            true = step.true_gradients()
            _update(optimizer, true, variables)
            optimizer.record(state, True)
            optimizer.note_gradient_norm(true, variables, True)
            return tf.constant(True)

        def skip_step() -> Any:
            optimizer.record(state, False)
            optimizer.count_overflows(step.not_finite(), variables)
            return tf.constant(False)

        return tf.cond(step.is_finite(), apply_step, skip_step)


def _update(optimizer: Any, true: list, variables: list) -> None:
    local = [keras_variables.local(variable) for variable in variables]
    optimizer.inner_optimizer.apply(true, local)


def _update_or_restore(
    optimizer: Any, state: Any, grads: list, variables: list, scale: Any
) -> Any:
    """Updates in any case, and selects the old values if it has to be skipped.

    A kernel that updates selects as well, at no cost. A conditional would make
    a GPU wait for the host, and copy every slot.
    """
    true = unscale.one_by_one(grads, variables, scale)
    # No division by 1 or more makes an infinity.
    bad = finite.not_finite(true if optimizer.rule.lowest_scale < 1 else grads)
    applied = tf.logical_not(tf.reduce_any(bad))
    inner = optimizer.inner_optimizer
    used = optimizer.model_variables + inner.variables
    before = [tf.identity(variable.value) for variable in used]
    optimizer.note_gradient_norm(true, variables, applied)
    selection = optimizers.Selection(applied, used)
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


def _divided_early(
    grads: list, variables: list, scale: Any
) -> tuple[list, frozenset[int]]:
    """Divides what each replica best divides before the sum; says which."""
    # In place, where it has computed them. The sum lies in one buffer for all
    # replicas, and its quotient takes another for each.
    one = tf.distribute.get_strategy().num_replicas_in_sync == 1
    if scale is None or one or compilation.by_xla():
        return grads, frozenset()
    early = unscale.alone(grads, variables)
    true = unscale.unscale([grads[position] for position in early], scale)
    by_position = dict(zip(early, true, strict=True))
    divided = [by_position.get(place, each) for place, each in enumerate(grads)]
    return divided, early


class _Step:
    """The gradients of a step that TensorFlow runs operation by operation.

    The check reads scaled gradients; they are divided where they are applied,
    except for the `early` ones. A scale of `None` divides nothing.
    """

    def __init__(
        self, grads: list, variables: list, scale: Any, early: frozenset[int]
    ) -> None:
        self._grads, self._variables = grads, variables
        self._blocks = unscale.joined(grads, variables, early)
        self._count, self._scale = len(grads), scale

    def is_finite(self) -> Any:
        """Returns a boolean scalar: would every true gradient be finite?"""
        tensors = [block.tensor for block in self._blocks]
        return tf.cond(
            finite.surely_finite(tensors, self._scale),
            lambda: tf.constant(True),
            lambda: unscale.all_finite(self._divided()),
        )

    def not_finite(self) -> Any:
        """Returns a boolean vector, true for each one that is not finite."""
        return unscale.not_finite(self._divided(), self._count)

    def true_gradients(self) -> list:
        """Returns the gradients divided by the scale."""
        return unscale.parts(self._divided(), self._count)

    def _divided(self) -> list[unscale.Block]:
        return unscale.divided(self._blocks, self._scale)
