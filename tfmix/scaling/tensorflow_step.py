"""One optimizer step under TensorFlow: sum, unscale, check, apply or skip."""

from typing import Any

import tensorflow as tf

from tfmix.scaling import blocks, distribute, unscaled


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
    grads = distribute.sum_over_replicas(grads)
    note = optimizer.unscaled_note.take()
    seen_bad = distribute.sum_over_replicas(unscaled.seen_bad(note))
    keras_variables = optimizer.variables + optimizer.model_variables
    with distribute.one_replica(keras_variables, optimizer):
        state = optimizer.state()
        scale = unscaled.divisor(note, optimizer.rule.current(state))
        true = blocks.unscaled(grads, variables, scale)
        # Taken apart out here: inside the conditional some would be of its
        # graph and some of this one, which TensorFlow's all-reduce refuses.
        inner_grads = blocks.parts(true, len(grads))
        is_finite = blocks.all_finite(true)
        for bad in seen_bad:
            is_finite = tf.logical_and(is_finite, bad == 0)

        def apply_step() -> Any:
            local = [distribute.local(variable) for variable in variables]
            optimizer.inner_optimizer.apply(inner_grads, local)
            optimizer.record(state, True)
            return tf.constant(True)

        def skip_step() -> Any:
            optimizer.record(state, False)
            bad = blocks.not_finite(true, len(grads))
            optimizer.count_overflows(bad, variables)
            return tf.constant(False)

        return tf.cond(is_finite, apply_step, skip_step)
