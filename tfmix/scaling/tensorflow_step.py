"""One optimizer step under TensorFlow: sum, unscale, check, apply or skip."""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfmix.scaling import distribute, finite, gradients, unscaled

if TYPE_CHECKING:
    from tfmix.scaling.optimizer import LossScaleOptimizer


def apply(
    optimizer: "LossScaleOptimizer", grads: list[Any], variables: list[Any]
) -> Any:
    """Applies the gradients on all replicas or on none.

    Args:
        optimizer: The optimizer, built.
        grads: Scaled gradients of this replica; `None` where there is none.
        variables: The variables they belong to.

    Returns:
        Boolean scalar tensor, whether the step was applied.
    """
    distribute.check_replica_context()
    grads = distribute.sum_over_replicas(grads)
    note = optimizer.unscaled_note.take()
    seen_bad = distribute.sum_over_replicas(unscaled.seen_bad(note))
    keras_variables = optimizer.variables + optimizer.model_variables
    with distribute.one_replica(keras_variables, optimizer):
        state = optimizer.state()
        scale = unscaled.divisor(note, optimizer.rule.current(state))
        grads = gradients.unscale_all(grads, variables, scale)
        is_finite = finite.all_finite(grads)
        for bad in seen_bad:
            is_finite = tf.logical_and(is_finite, bad == 0)

        def apply_step() -> Any:
            local = [distribute.local(variable) for variable in variables]
            optimizer.inner_optimizer.apply(grads, local)
            optimizer.record(state, True)
            return tf.constant(True)

        def skip_step() -> Any:
            optimizer.record(state, False)
            optimizer.count_overflows(grads, variables)
            return tf.constant(False)

        return tf.cond(is_finite, apply_step, skip_step)
