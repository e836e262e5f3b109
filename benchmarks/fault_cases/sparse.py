"""Faults of sparse gradients (`tf.IndexedSlices`)."""

from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import words
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Outcome, fault

_ROWS = 100


def _step(system: Any, rows: Any, values: Any) -> tuple[Any, Any]:
    import tensorflow as tf

    table = system.variable(np.ones((_ROWS, 2)), "table")
    optimizer = system.wrap(keras.optimizers.SGD(1.0), initial_scale=1.0)
    optimizer.build([table])
    gradient = tf.IndexedSlices(
        optimizer.scale_loss(tf.constant(values, "float32")),
        tf.constant(rows),
        dense_shape=(_ROWS, 2),
    )
    optimizer.apply([gradient], [table])
    return table, optimizer


def _outcome(table: Any, optimizer: Any) -> Outcome:
    untouched = bool((words.to_numpy(table) == 1.0).all())
    return Outcome(
        untouched,
        f"{words.weights([table])}, {words.progress(optimizer, 1)}",
    )


@fault(TENSORFLOW_ONLY)
def duplicate_sparse_rows(system: Any) -> Outcome:
    """Two sparse rows are finite, their sum on one row of the table is not."""
    largest = float(np.finfo("float32").max)
    return _outcome(*_step(system, [3, 3], [[largest, 1.0], [largest, 1.0]]))


@fault(TENSORFLOW_ONLY)
def bad_sparse_row(system: Any) -> Outcome:
    """One of two sparse rows is NaN."""
    return _outcome(*_step(system, [3, 5], [[1.0, 1.0], [np.nan, 1.0]]))
