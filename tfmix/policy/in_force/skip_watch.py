"""Warns once in a `fit` of skipped steps that no scale can prevent."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from tfmix import _bar_output, _formats
from tfmix.policy.in_force import bound_arguments, suited_optimizer
from tfmix.scaling import optimizer as scaling
from tfmix.scaling import rules

STANDSTILL = (
    "No update was applied in the last %d steps: the loss scale is %g, %d "
    "step(s) were skipped in a row. "
)
_WORN_DOWN = (
    "Skipped in this epoch: %d of %d steps, at a loss scale of %g, the "
    "lowest, where small gradients become 0. "
)
# A scale that is too high costs the first steps of a run: so many in a row
# are no epoch's accident.
_NOT_BY_ACCIDENT = 3


class SkipWatch(keras.callbacks.Callback):
    """Reads an optimizer's counts of steps once an epoch, on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._told = False
        # Applied and skipped steps up to the end of the last epoch.
        self._counted: tuple[int, int] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts anew."""
        self._told, self._counted = False, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads what the first epoch starts from."""
        # Not before: other callbacks restore a run as training begins.
        self._counted = self._counted or self._count()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Warns if every step was skipped, or one at the lowest scale."""
        before, self._counted = self._counted, self._count()
        if before is None or self._counted is None or self._told:
            return
        applied, skipped = (
            now - was for now, was in zip(self._counted, before, strict=True)
        )
        if skipped:
            self._tell(applied, skipped)

    def _count(self) -> tuple[int, int] | None:
        # Asking for `self.model` brings the variables up to date on JAX.
        optimizer = self.model.optimizer
        if not isinstance(optimizer, scaling.LossScaleOptimizer):
            return None
        applied = int(keras.ops.convert_to_numpy(optimizer.iterations))
        return applied, optimizer.skipped_steps

    def _tell(self, applied: int, skipped: int) -> None:
        optimizer = self.model.optimizer
        scale, rule = optimizer.loss_scale, optimizer.rule
        dynamic = isinstance(rule, rules.DynamicLossScale)
        lowest = dynamic and scale <= rule.lowest_scale
        values: tuple[float, ...]
        if not applied and (lowest or skipped >= _NOT_BY_ACCIDENT):
            in_a_row = optimizer.consecutive_skips
            text, values = STANDSTILL, (skipped, scale, in_a_row)
        elif lowest:
            text, values = _WORN_DOWN, (skipped, applied + skipped, scale)
        else:
            return
        self._told = True
        _bar_output.warn(self, text + _advice(self.model, lowest), *values)


def _advice(model: keras.Model, lowest: bool) -> str:
    """Says where to look for the cause."""
    look = "A lower scale cannot mend this" if lowest else "If it goes on"
    beyond, instead = "infinity", ""
    if suited_optimizer.computes_in(model, "float16"):
        beyond = f"numbers beyond {_formats.FLOAT16.max:g}"
        instead = ", or use 'mixed_bfloat16'"
    return (
        f"{look}: look for NaN or {beyond} in the data (`tfmix.check(model, "
        f"x, y)` names the layer){instead}."
    )


def fit(
    model: keras.Model, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Calls a model's `fit` with a watch among its callbacks."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        # Not our error to raise: Python's own says it better.
        return original(*args, **kwargs)
    given = bound_arguments.get(bound, "callbacks")
    is_list = isinstance(given, keras.callbacks.CallbackList)
    found = given.callbacks if is_list else tree.flatten(given or [])
    if any(isinstance(each, SkipWatch) for each in found):
        return original(*args, **kwargs)
    watch = SkipWatch()
    if not is_list:
        bound_arguments.put(bound, "callbacks", [*found, watch])
        return original(*bound.args, **bound.kwargs)
    # Keras takes such a list as it is, the model and parameters in it.
    watch.set_model(model)
    watch.set_params(given.params)
    found.append(watch)
    try:
        return original(*args, **kwargs)
    finally:
        found.remove(watch)
