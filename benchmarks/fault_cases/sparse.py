"""Faults of sparse gradients (`tf.IndexedSlices`)."""

from typing import Any

import keras
import numpy as np

from benchmarks.fault_cases import words
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Fault, Outcome

_ROWS = 100
_LARGEST = float(np.finfo("float32").max)


def _step(
    name: str, title: str, rows: list[int], values: list[list[float]]
) -> Fault:
    """A step whose gradient has some rows of a table."""

    def provoke(system: Any) -> Outcome:
        import tensorflow as tf

        table = system.variable(np.ones((_ROWS, 2)), "table")
        optimizer = system.wrap(keras.optimizers.SGD(1.0), initial_scale=1.0)
        optimizer.build([table])
        scaled = optimizer.scale_loss(tf.constant(values, "float32"))
        slices = tf.IndexedSlices(scaled, tf.constant(rows), (_ROWS, 2))
        optimizer.apply([slices], [table])
        return Outcome(
            bool((words.to_numpy(table) == 1.0).all()),
            f"{words.weights([table])}, {words.progress(optimizer, 1)}",
        )

    return Fault(name, title, provoke, TENSORFLOW_ONLY)


DUPLICATE_ROWS = _step(
    "duplicate-sparse-rows",
    "Two sparse rows are finite, their sum on one row of the table is not",
    [3, 3],
    [[_LARGEST, 1.0], [_LARGEST, 1.0]],
)
BAD_ROW = _step(
    "bad-sparse-row",
    "One of two sparse rows is NaN",
    [3, 5],
    [[1.0, 1.0], [np.nan, 1.0]],
)
