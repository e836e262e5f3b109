"""One optimizer step under TensorFlow: sum, unscale, check, apply or skip."""

from typing import Any

import tensorflow as tf

from tfmix._keras import compilation
from tfmix.scaling.step import (
    blocks,
    branch,
    deferred,
    distribute,
    fused,
    magnitude,
    unscale,
    unscaled,
)


def apply(optimizer: Any, grads: list[Any], variables: list[Any]) -> Any:
    """Applies the gradients on all replicas or on none.

    Args:
        optimizer: A `LossScaleOptimizer`, built.
        grads: Scaled gradients of this replica; `None` where there is none.
        variables: The variables they belong to.

    Returns:
        Boolean scalar tensor, whether the step was applied.
    """
    distribute.check_replica_context()
    note = optimizer.unscaled_note.take()
    keras_variables = optimizer.variables + optimizer.model_variables
    with distribute.one_replica(keras_variables):
        state = optimizer.state()
        scale = unscaled.divisor(note, optimizer.rule.current(state))
    grads, early = _divided_early(grads, variables, scale)
    grads = distribute.sum_over_replicas(grads)
    seen_bad = distribute.sum_over_replicas(unscaled.seen_bad(note))
    with distribute.one_replica(keras_variables, optimizer):
        step = (_XlaStep if compilation.by_xla() else _Step)(
            grads, variables, scale, early
        )
        if branch.is_large(keras_variables):
            step.defer()
        is_finite = step.is_finite()
        for bad in seen_bad:
            is_finite = tf.logical_and(is_finite, bad == 0)

        def apply_step() -> Any:
            local = [distribute.local(variable) for variable in variables]
            with fused.updates(optimizer.inner_optimizer):
                optimizer.inner_optimizer.apply(step.true_gradients(), local)
            optimizer.record(state, True)
            return tf.constant(True)

        def skip_step() -> Any:
            optimizer.record(state, False)
            optimizer.count_overflows(step.not_finite(), variables)
            return tf.constant(False)

        return branch.cond(is_finite, apply_step, skip_step, keras_variables)


def _divided_early(
    grads: list[Any], variables: list[Any], scale: Any
) -> tuple[list[Any], frozenset[int]]:
    """Divides what each replica best divides before the sum; says which.

    It does so in place, where it has computed them. The sum lies in one
    buffer for all replicas, and its quotient takes another for each.
    """
    if distribute.on_one_replica() or compilation.by_xla():
        return grads, frozenset()
    early = blocks.alone(grads, variables)
    true = unscale.unscale([grads[position] for position in early], scale)
    by_position = dict(zip(early, true, strict=True))
    divided = [by_position.get(place, each) for place, each in enumerate(grads)]
    return divided, early


class _Step:
    """The gradients of a step that TensorFlow runs operation by operation.

    The check reads the scaled gradients; they are divided where they are
    applied, except for the `early` ones.
    """

    def __init__(
        self,
        grads: list[Any],
        variables: list[Any],
        scale: Any,
        early: frozenset[int],
    ) -> None:
        self._blocks = blocks.joined(grads, variables, early)
        self._count = len(grads)
        self._scale = scale

    def defer(self) -> None:
        """Computes large gradients where they are needed, if possible."""
        self._blocks = deferred.deferred(self._blocks)

    def is_finite(self) -> Any:
        """Returns a boolean scalar: would every true gradient be finite?"""
        return tf.cond(
            magnitude.surely_finite(self._blocks, self._scale),
            lambda: tf.constant(True),
            lambda: blocks.all_finite(self._divided()),
        )

    def not_finite(self) -> Any:
        """Returns a boolean vector, true for each one that is not finite."""
        return blocks.not_finite(self._divided(), self._count)

    def true_gradients(self) -> list[Any]:
        """Returns the gradients divided by the scale."""
        return blocks.parts(self._divided(), self._count)

    def _divided(self) -> list[blocks.Block]:
        return blocks.divided(deferred.computed(self._blocks), self._scale)


class _XlaStep(_Step):
    """The gradients of a step that XLA compiles.

    Each gradient is divided apart, which fuses with its update; only the
    check joins them. Who is to blame falls off on the way: to find it out in
    the branch of the skip would take one more kernel for each large variable.
    """

    def __init__(
        self,
        grads: list[Any],
        variables: list[Any],
        scale: Any,
        early: frozenset[int],
    ) -> None:
        super().__init__(grads, variables, scale, early)
        self._grads, self._variables = grads, variables
        self._bad = super().not_finite()

    def defer(self) -> None:
        """Leaves it to XLA."""

    def is_finite(self) -> Any:
        return tf.logical_not(tf.reduce_any(self._bad))

    def not_finite(self) -> Any:
        return compilation.kept_apart(self._bad)

    def true_gradients(self) -> list[Any]:
        apart = blocks.apart(self._grads, self._variables)
        divided = blocks.divided(apart, self._scale)
        return blocks.parts(divided, self._count)
