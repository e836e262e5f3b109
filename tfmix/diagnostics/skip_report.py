"""Reports skipped steps."""

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

# A smaller share of an epoch's steps may be skipped without a report.
_FEW = 0.05
_DATA = ("x", "y", "sample_weight")
_IDLE = "nothing is learnt; a LossScaleMonitor would stop the run"


class SkipWatch(keras.callbacks.Callback):
    """Reads an optimizer's counts of steps once an epoch, on the host."""

    def __init__(self) -> None:
        super().__init__()
        # The arguments of `fit`, by their names.
        self.data: Mapping[str, Any] = {}
        self.batch_size: int | None = None
        self._reset()

    def _reset(self) -> None:
        # The applied and skipped steps up to the end of the last epoch.
        self._counted: tuple[int, int] | None = None
        self._has_reported = False
        self._bad_data: skip_causes.BadData | None = None
        self._last_cause = ""
        self._silent_until = 0
        # The epoch of its first report, and applied and skipped steps since.
        self._since = 0, 0, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets an earlier run."""
        self._reset()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads the counts before the first epoch."""
        # Other callbacks may restore a run in `on_train_begin`.
        self._counted = self._counted or self._count()
        self._has_reported = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reports how many steps were skipped, and the likeliest cause."""
        before, self._counted = self._counted, self._count()
        if self._counted is None:
            return
        # Optimizers that the model holds exist from their first step on.
        before = before or (0, 0)
        applied, skipped = (
            now - was for now, was in zip(self._counted, before, strict=True)
        )
        if skipped:
            self.on_skips(epoch + 1, applied, skipped, _loss(logs or {}))

    def on_skips(
        self, epoch: int, applied: int, skipped: int, loss: float
    ) -> None:
        """Reports the skipped steps of an epoch, if there are many."""
        if not self._has_reported and self._needs_a_line(applied, skipped):
            self._report(epoch, applied, skipped, loss)

    def _count(self) -> tuple[int, int] | None:
        # Reading `self.model` updates the variables on JAX.
        optimizers = bare_optimizers.skippers(self.model)
        if not optimizers:
            return None
        applied, skipped = zip(*map(steps, optimizers), strict=True)
        return sum(applied), sum(skipped)

    def _optimizers(self) -> list[bare_optimizers.Skipper]:
        """Lists the optimizers that skip steps; a model may have several."""
        every = bare_optimizers.skippers(self.model)
        # A model with its own optimizers may never use that of `compile`.
        stepped = [x for x in every if any(steps(x))]
        return stepped or every

    def _needs_a_line(self, applied: int, skipped: int) -> bool:
        """Returns whether more than a few steps, or bad rows, were skipped."""
        if not self._last_cause and self._find_bad_data().text:
            return True
        # Each growth of the scale is a trial that may cost a step.
        rule = self._optimizers()[0].rule
        trials = applied / getattr(rule, "growth_steps", math.inf)
        return skipped > _FEW * (applied + skipped) + trials

    def _report(
        self, epoch: int, applied: int, skipped: int, loss: float
    ) -> None:
        self._has_reported = True
        cause = self.cause(skipped, loss)
        is_new = cause.kind != self._last_cause
        first, *before = (epoch, 0, 0) if is_new else self._since
        applied, skipped = applied + before[0], skipped + before[1]
        self._last_cause, self._since = cause.kind, (first, applied, skipped)
        if not is_new and epoch < self._silent_until:
            return
        # A cause that stays is reported again after 2, 4, 8 epochs.
        self._silent_until = epoch + (epoch - first) + 2
        share = f"{skipped} of {applied + skipped} steps"
        if is_new:
            were = f"{epoch} was" if skipped == 1 else f"{epoch} were"
            text = f"of epoch {were} skipped: {cause.text}"
        else:
            text = f"of epochs {first} to {epoch} were skipped, as before"
            text += "" if applied else f": {_IDLE}"
        progress_bar.warn(self, "%s %s", share, text)

    def _find_bad_data(self) -> skip_causes.BadData:
        if self._bad_data is None:
            self.data = skip_causes.arrays(self.data)
            self._bad_data = skip_causes.bad_data(self.data)
        return self._bad_data

    def cause(
        self, skipped: float = math.inf, loss: float = math.nan
    ) -> skip_causes.Cause:
        """Measures why steps of an epoch are skipped."""
        bad_data = self._find_bad_data()
        # Each row is in one step of an epoch.
        if bad_data.text and skipped <= len(bad_data.rows):
            return bad_data.cause
        overflowed = {
            path: count
            for optimizer in self._optimizers()
            for path, count in optimizer.overflow_counts.items()
        }
        kind, text = skip_causes.of_model(
            self.model,
            self.data,
            bad_data.rows,
            self.batch_size,
            loss,
            overflowed,
        )
        if not bad_data.text:
            return skip_causes.Cause(kind, text)
        if kind == "unknown":
            return bad_data.cause
        return skip_causes.Cause(kind, f"{bad_data.text}. Also, {text}")


def steps(optimizer: bare_optimizers.Skipper) -> tuple[int, int]:
    """Returns the numbers of applied and skipped steps."""
    applied = compilation.host_value(optimizer.applies)
    return int(applied), optimizer.skipped_steps


def _loss(logs: Mapping[str, Any]) -> float:
    """Returns an epoch's loss; the largest if there are several (a GAN)."""
    losses = {
        name: float(value)
        for name, value in logs.items()
        if name.endswith("loss") and not name.startswith("val_")
    }
    return losses.get("loss", max(losses.values(), key=abs, default=math.nan))


def fit_with(
    make_watch: Callable[[], SkipWatch],
    model: keras.Model,
    original: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a model's `fit` with a watch among its callbacks."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        # Python's own error for wrong arguments is better than ours.
        return original(*args, **kwargs)
    argument = _arguments.of_call(bound, "callbacks")
    is_list = isinstance(argument, keras.callbacks.CallbackList)
    callbacks = argument.callbacks if is_list else tree.flatten(argument or [])
    watches = [
        callback for callback in callbacks if isinstance(callback, SkipWatch)
    ]
    watch = watches[0] if watches else make_watch()
    watch.data = {name: _arguments.of_call(bound, name) for name in _DATA}
    watch.batch_size = _arguments.of_call(bound, "batch_size")
    if watches:
        return original(*args, **kwargs)
    if not is_list:
        _arguments.put_in_call(bound, "callbacks", [*callbacks, watch])
        return original(*bound.args, **bound.kwargs)
    # Keras does not set the model and parameters of a `CallbackList`.
    watch.set_model(model)
    watch.set_params(argument.params)
    callbacks.append(watch)
    try:
        return original(*args, **kwargs)
    finally:
        callbacks.remove(watch)


fit = functools.partial(fit_with, SkipWatch)
