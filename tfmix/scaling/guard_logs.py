"""What a guarded model reports when the steps of an epoch were skipped.

A skipped step gives the metrics their old values back. Before the first
applied step of an epoch those are empty, and Keras would report a loss of 0,
the best there is. The skipped batch's own values then stand in.
"""

from typing import Any

import keras
from keras import ops

# Its own loss is reported if it is finite: only the scaled gradients were
# not. One that is not finite stays hidden, or TerminateOnNaN would stop a
# healthy run at its first bad batch; so many in a row are no accident.
_NOT_BY_ACCIDENT = 3


def after_step(model: Any, logs: Any) -> Any:
    """Returns a step's logs as the metrics stand after a skip was undone.

    Args:
        model: The guarded model; its metrics hold what they hold.
        logs: What the step itself returned, read before.
    """
    results = metrics_result(model)
    if not isinstance(logs, dict) or not logs:
        return logs if logs else results
    results = {key: value for key, value in results.items() if key in logs}
    if not results:
        return logs
    empty = ops.logical_not(_recorded(model))
    no_accident = model.optimizer.skipped_in_a_row(_NOT_BY_ACCIDENT)

    def telling(own: Any, result: Any) -> Any:
        own_tells = ops.logical_or(ops.isfinite(own), no_accident)
        return ops.where(ops.logical_and(empty, own_tells), own, result)

    return logs | {key: telling(logs[key], results[key]) for key in results}


def after_epoch(model: Any) -> dict[str, Any]:
    """Stands in for `model.get_metrics_result` of a guarded model.

    Keras reads the metrics once more at the end of an epoch, and takes the
    last step's logs where it gets other keys: those, if all is empty.
    """
    results = metrics_result(model)
    if not results:
        return results
    recorded = _recorded(model)
    return results if _is_symbolic(recorded) or recorded else {}


def metrics_result(model: Any) -> dict[str, Any]:
    """Returns the metrics' values, by the model's own method."""
    return type(model).get_metrics_result(model)


def _recorded(model: Any) -> Any:
    """Boolean scalar: has anything been recorded since the last reset?"""
    # The first metric is the loss, a sum and a count that start at zero.
    values = [variable.value for variable in model.metrics[0].variables]
    return ops.any(ops.stack([ops.any(ops.not_equal(v, 0)) for v in values]))


def _is_symbolic(tensor: Any) -> bool:
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.is_symbolic_tensor(tensor)
    import jax

    return isinstance(tensor, jax.core.Tracer)
