"""Tells of skipped steps that no search for a loss scale explains."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import tree

from tfmix import _arguments
from tfmix._keras import compilation
from tfmix.autocast import bare_optimizers
from tfmix.diagnostics import progress_bar, skip_causes
from tfmix.loss_scaling import rules

# A scale that is too high costs the first steps of a run, and a few later on:
# so many are no accident.
_NOT_BY_ACCIDENT = 3
# Share of an epoch's steps that may be skipped without a word.
_FEW = 0.05
_DATA = ("x", "y", "sample_weight")
_IDLE = "nothing is learnt; a LossScaleMonitor would stop the run"


class SkipWatch(keras.callbacks.Callback):
    """Reads an optimizer's counts of steps once an epoch, on the host."""

    def __init__(self) -> None:
        super().__init__()
        # What `fit` was given, by its arguments' names.
        self.data: Mapping[str, Any] = {}
        self.batch_size: int | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        # Applied and skipped steps up to the end of the last epoch.
        self._counted: tuple[int, int] | None = None
        # Whether an epoch has trained, and the skips since that one.
        self._trained, self._later = False, 0.0
        # Skips of the last epochs that applied nothing.
        self._idle = 0
        # The loss scale at the end of the last epoch that skipped steps.
        self._scale: float | None = None
        self._told = False
        self._bad_data: skip_causes.BadData | None = None
        self._last_cause = ""
        # A cause that stays is told of again after 2, 4, 8 epochs.
        self._wait, self._silent_until = 2, 0
        # The epoch where it was told of first, applied and skipped steps since.
        self._since = 0, 0, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts anew."""
        self._start_anew()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads what the first epoch starts from."""
        # Not before: other callbacks restore a run as training begins.
        self._counted = self._counted or self._count()
        self._told = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Says how many steps were skipped, and the likeliest cause."""
        before, self._counted = self._counted, self._count()
        if self._counted is None:
            return
        # Optimizers of the model's own count from their first step on.
        before = before or (0, 0)
        applied, skipped = (
            now - was for now, was in zip(self._counted, before, strict=True)
        )
        if (
            skipped
            and not self._told
            and self._is_unexplained(applied, skipped)
        ):
            self._tell(epoch + 1, applied, skipped, _loss(logs or {}))
        self._trained = self._trained or applied > 0

    def _count(self) -> tuple[int, int] | None:
        # Asking for `self.model` brings the variables up to date on JAX.
        optimizers = bare_optimizers.skippers(self.model)
        if not optimizers:
            return None
        applied, skipped = zip(*map(steps, optimizers), strict=True)
        return sum(applied), sum(skipped)

    def _optimizers(self) -> list[bare_optimizers.Skipper]:
        """Lists what skips steps: a model may have several of its own."""
        every = bare_optimizers.skippers(self.model)
        # Beside a model's own, the one that `compile` made may have no use.
        stepped = [x for x in every if any(steps(x))]
        return stepped or every

    def _is_unexplained(self, applied: int, skipped: int) -> bool:
        """Says whether skips are more than a search for the scale costs."""
        optimizer = self._optimizers()[0]
        rule = optimizer.rule
        is_dynamic = isinstance(rule, rules.DynamicLossScale)
        is_lowest = is_dynamic and optimizer.loss_scale <= rule.lowest_scale
        # Each growth of the scale is a trial, too.
        trials = applied / getattr(rule, "growth_steps", math.inf)
        self._idle = 0 if applied else self._idle + skipped
        if self._trained:
            self._later += max(skipped - trials, 0.0)
        bad_data = self._found_in_data().text
        if bad_data and not self._last_cause:
            # However few: no search explains them.
            return True
        if is_lowest or skipped <= _FEW * (applied + skipped) + trials:
            return is_lowest
        if isinstance(rule, rules.FixedLossScale | rules.NoLossScale):
            return True
        before, self._scale = self._scale, optimizer.loss_scale
        first = float(rule.init()[0])
        if is_dynamic and self._scale >= (before or first):
            # Bad data moves no scale: nothing was searched for.
            return True
        new = self._later if applied else self._idle
        return bool(bad_data) or new >= _NOT_BY_ACCIDENT

    def _tell(
        self, epoch: int, applied: int, skipped: int, loss: float
    ) -> None:
        self._told = True
        cause = self.cause(skipped, loss)
        if cause.kind == self._last_cause:
            self._tell_again(epoch, applied, skipped)
            return
        self._last_cause = cause.kind
        self._wait, self._silent_until = 2, epoch + 2
        self._since = epoch, applied, skipped
        optimizer = self._optimizers()[0]
        scale = f" at a loss scale of {optimizer.loss_scale:g}"
        if isinstance(optimizer.rule, rules.NoLossScale):
            scale = ""
        what = f"{_share(applied, skipped)} of epoch {epoch}"
        verb = "was" if skipped == 1 else "were"
        text = cause.text
        progress_bar.warn(self, "%s %s skipped%s: %s", what, verb, scale, text)

    def _tell_again(self, epoch: int, applied: int, skipped: int) -> None:
        first, applied_before, skipped_before = self._since
        applied, skipped = applied + applied_before, skipped + skipped_before
        self._since = first, applied, skipped
        if epoch < self._silent_until:
            return
        self._wait *= 2
        self._silent_until = epoch + self._wait
        what = f"{_share(applied, skipped)} of epochs {first} to {epoch}"
        end = "" if applied else f": {_IDLE}"
        progress_bar.warn(self, "%s were skipped, as before%s", what, end)

    def _found_in_data(self) -> skip_causes.BadData:
        if self._bad_data is None:
            self.data = skip_causes.arrays(self.data)
            self._bad_data = skip_causes.bad_data(self.data)
        return self._bad_data

    def cause(
        self, skipped: float = math.inf, loss: float = math.nan
    ) -> skip_causes.Cause:
        """Says why steps of an epoch are skipped, by what can be measured."""
        bad_data = self._found_in_data()
        # A row is in one step of an epoch.
        if bad_data.text and skipped <= len(bad_data.rows):
            return bad_data.cause
        data = skip_causes.without(self.data, bad_data.rows)
        of_model = self._of_model(data, loss)
        if not bad_data.text:
            return of_model
        kind, text = of_model
        if kind == "unknown":
            return bad_data.cause
        return skip_causes.Cause(kind, f"{bad_data.text}. Also, {text}")

    def _of_model(
        self, data: Mapping[str, Any], loss: float
    ) -> skip_causes.Cause:
        return skip_causes.of_model(
            self.model,
            data,
            self.batch_size,
            loss,
            {
                path: count
                for optimizer in self._optimizers()
                for path, count in optimizer.overflow_counts.items()
            },
        )


def steps(optimizer: bare_optimizers.Skipper) -> tuple[int, int]:
    """Returns how many steps were applied, and skipped."""
    applied = compilation.host_value(optimizer.iterations)
    return int(applied), optimizer.skipped_steps


def _loss(logs: Mapping[str, Any]) -> float:
    """Returns an epoch's loss; of several, as a GAN's, the largest."""
    losses = {
        name: float(value)
        for name, value in logs.items()
        if name.endswith("loss") and not name.startswith("val_")
    }
    return losses.get("loss", max(losses.values(), key=abs, default=math.nan))


def _share(applied: int, skipped: int) -> str:
    return f"{skipped} of {applied + skipped} steps"


def reporting(watch_class: type[SkipWatch]) -> Callable:
    """Returns what calls a model's `fit` with a watch of that class."""
    return functools.partial(_fit, watch_class)


def _fit(
    watch_class: type[SkipWatch],
    model: keras.Model,
    original: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a model's `fit` with a watch among its callbacks."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        # Not our error to raise: Python's own says it better.
        return original(*args, **kwargs)
    given = _arguments.of_call(bound, "callbacks")
    is_list = isinstance(given, keras.callbacks.CallbackList)
    callbacks = given.callbacks if is_list else tree.flatten(given or [])
    watches = [
        callback for callback in callbacks if isinstance(callback, SkipWatch)
    ]
    watch = watches[0] if watches else watch_class()
    watch.data = {name: _arguments.of_call(bound, name) for name in _DATA}
    watch.batch_size = _arguments.of_call(bound, "batch_size")
    if watches:
        return original(*args, **kwargs)
    if not is_list:
        _arguments.put_in_call(bound, "callbacks", [*callbacks, watch])
        return original(*bound.args, **bound.kwargs)
    # Keras takes such a list as it is, the model and parameters in it.
    watch.set_model(model)
    watch.set_params(given.params)
    callbacks.append(watch)
    try:
        return original(*args, **kwargs)
    finally:
        callbacks.remove(watch)


fit = reporting(SkipWatch)
