"""The logs of a step that may be skipped: metrics as they are without it."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from tfmix._keras import compilation, global_state, replacements, training
from tfmix.scaling import optimizer as optimizers
from tfmix.step import finite

# Note on what a metric returns in a step: how to compute it anew.
_RESULT = "_tfmix_metric_result"


class StepLogs:
    """The logs of one model's steps."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        # How many replicas are in a step just now; their threads take turns.
        self._steps, self._undo = 0, contextlib.ExitStack()
        # Variables of metrics, with what a reset leaves in them.
        self._resets: dict[int, tuple[keras.Variable, np.ndarray]] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes in a step on the results of metrics that they are these."""
        self._steps += 1
        if self._steps == 1:
            for metric in training.metrics(self._model):
                result = functools.partial(_noted, metric.result)
                replacements.swap(self._undo, metric, "result", result)
        try:
            yield
        finally:
            self._steps -= 1
            if not self._steps:
                self._undo.close()

    def told(self, logs: Any, applied: Any) -> Any:
        """Returns what a step reports, once a skip was undone.

        Metrics that hold nothing without it report its own results, or NaN if
        one of these is not finite. What is no metric's result stays as it is.

        Args:
            logs: What the step returned, of any structure.
            applied: Boolean scalar tensor.
        """
        own = [leaf for leaf in tree.flatten(logs) if _renewal(leaf)]
        if not own:
            return logs

        def without() -> list:
            fine = ops.all(ops.stack([*map(finite.is_finite, own)]))
            measured = [_if_measured(fine, leaf) for leaf in own]
            renewed = [_renewal(leaf)() for leaf in own]
            return _where(self._is_empty(), measured, renewed)

        if compilation.by_xla():
            results = iter(_where(applied, own, without()))
        else:
            results = iter(ops.cond(applied, lambda: own, without))
        return tree.map_structure(
            lambda leaf: next(results) if _renewal(leaf) else leaf, logs
        )

    def reset_metrics(self, original: Callable) -> None:
        """Notes what a reset leaves in the metrics."""
        original()
        for metric in training.metrics(self._model):
            for v in metric.variables:
                is_new = id(v) not in self._resets
                if is_new and compilation.is_host_readable(v):
                    self._resets[id(v)] = v, compilation.host_value(v)

    def metrics_result(self, original: Callable) -> Any:
        """Hides metrics that a skip left empty from the end of an epoch."""
        optimizer = self._model.optimizer
        if not isinstance(optimizer, optimizers.LossScaleOptimizer):
            return original()
        if self._steps:
            return _noted(original)
        # Keras then takes the last step's logs, as it does for other keys.
        empty = ops.logical_and(
            self._is_empty(), ops.logical_not(optimizer.last_step_applied())
        )
        unknown = compilation.is_symbolic(empty)
        return original() if unknown or not empty else {}

    def _is_empty(self) -> Any:
        """Boolean scalar: do the metrics hold what a reset left in them?"""
        as_reset = [
            ops.all(ops.equal(v.value, self._resets.get(id(v), (v, 0))[1]))
            for v in self._model.metrics_variables
        ]
        return ops.all(ops.stack(as_reset or [False]))


def _noted(result: Callable[[], Any]) -> Any:
    """Returns a result, whose leaves know how to be computed anew."""
    values = result()
    for place, leaf in enumerate(tree.flatten(values)):
        renew = functools.partial(_leaf, result, place)
        global_state.put_note(leaf, _RESULT, renew)
    return values


def _leaf(result: Callable, place: int) -> Any:
    return tree.flatten(result())[place]


def _renewal(leaf: Any) -> Any:
    return global_state.note(leaf, _RESULT) if ops.is_tensor(leaf) else None


def _if_measured(fine: Any, value: Any) -> Any:
    is_float = keras.backend.is_float_dtype(value.dtype)
    nothing = ops.full_like(value, float("nan")) if is_float else value
    return ops.where(fine, value, nothing)


def _where(condition: Any, these: list, others: list) -> list:
    pairs = zip(these, others, strict=True)
    return [ops.where(condition, *pair) for pair in pairs]
