"""One optimizer step under TensorFlow: unscale, check, apply or skip."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmix._keras import compilation, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.step import finite, unscale
from tfmix.step.state import Settings, State


def step(
    state: State,
    grads: Sequence,
    rows: Sequence[int],
    settings: Settings,
    unscaled: bool,
    is_data: Any = False,
) -> tuple[Any, State]:
    """Unscales and checks gradients, and applies them or skips the step.

    Args:
        state: From before the step.
        grads: A gradient, summed over the replicas, or `None`, for each
            variable of the settings.
        rows: The places of those that the inner optimizer is to be given.
        settings: What stays the same. Its inner optimizer assigns.
        unscaled: Whether the gradients are true ones already.
        is_data: Bool or boolean scalar tensor, whether gradients that are not
            finite come from data or a loss that are not.

    Returns:
        Boolean scalar tensor, was the step applied?, and the state after it.
    """
    scale = None if unscaled else settings.rule.current(state.scale)
    keeps_norm = state.gradient_norm is not None
    update = _Update(settings, rows, keeps_norm)
    run = _update_or_restore if compilation.by_xla() else _update_or_skip
    applied, bad, norm = run(update, grads, scale, settings.rule.may_enlarge)
    # Known in eager mode, where each operation costs.
    known = bool(applied) if tf.executing_eagerly() else applied
    norm = norm if keeps_norm else None
    return applied, state.after(settings, known, bad, norm, is_data)


class _Update:
    """What the inner optimizer does to the model's variables."""

    def __init__(
        self, settings: Settings, rows: Sequence[int], keeps_norm: bool
    ) -> None:
        self.inner, self.variables = settings.inner, settings.variables
        self._rows, self._keeps_norm = rows, keeps_norm

    def __call__(self, true: Sequence) -> None:
        local = [keras_variables.local(self.variables[n]) for n in self._rows]
        self.inner.apply([true[n] for n in self._rows], local)

    def norm(self, true: Sequence) -> Any:
        """Returns the norm of true gradients, 0 if it is not kept."""
        if not self._keeps_norm:
            return tf.zeros(())
        return unscale.norm(true, self.variables)


# Whether the step was applied, each variable's flag, and the norm.
_Outcome = tuple[Any, Any, Any]


def _update_or_skip(
    update: _Update, grads: Sequence, scale: Any, may_enlarge: bool
) -> _Outcome:
    """Updates if all gradients are finite, where a conditional skips work."""
    # In float32 before sparse rows are added up.
    grads = unscale.true_gradients(grads, update.variables, None)

    def true_gradients() -> list:
        return unscale.true_gradients(grads, update.variables, scale)

    bad = finite.not_finite(true_gradients() if may_enlarge else grads)

    def apply_step() -> Any:
        true = true_gradients()
        update(true)
        return tf.constant(True), update.norm(true)

    def skip_step() -> Any:
        return tf.constant(False), tf.zeros(())

    applied, norm = tf.cond(tf.reduce_any(bad), skip_step, apply_step)
    return applied, bad, norm


def _update_or_restore(
    update: _Update, grads: Sequence, scale: Any, may_enlarge: bool
) -> _Outcome:
    """Updates in any case, and selects the old values if it has to be skipped.

    A kernel that updates selects as well, at no cost. A conditional would make
    a GPU wait for the host, and copy every slot.
    """
    true = unscale.true_gradients(grads, update.variables, scale)
    bad = finite.not_finite(true if may_enlarge else grads)
    applied = tf.logical_not(tf.reduce_any(bad))
    norm = update.norm(true)
    used = update.variables + update.inner.variables
    before = [
        tf.convert_to_tensor(compilation.held(variable)) for variable in used
    ]
    selection = optimizers.Selection(applied, used)
    sparse = any(map(finite.is_sparse, true))
    if sparse and optimizers.divides_gradients(update.inner):
        # XLA asks for the shape of the quotient at compile time, and so for all
        # that its conditional reads: nothing of `applied` may be among it.
        update(true)
    else:
        with selection.of(update.inner):
            update([_nowhere_unless(applied, gradient) for gradient in true])
    for variable, old in zip(used, before, strict=True):
        if not selection.is_made(variable):
            variable.assign(tf.where(applied, variable, old))
    return applied, bad, norm


def _nowhere_unless(applied: Any, gradient: Any) -> Any:
    """Lets a sparse gradient have no row to change, unless it is applied."""
    # XLA leaves rows out that are not there.
    if not finite.is_sparse(gradient):
        return gradient
    outside = tf.cast(gradient.dense_shape[0], gradient.indices.dtype)
    rows = tf.where(applied, gradient.indices, outside)
    return tf.IndexedSlices(gradient.values, rows, gradient.dense_shape)
