"""Reports skipped steps."""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np

from tfmix import _bad_rows, _messages
from tfmix._keras import layers, replacing, training
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import state
from tfmix.tools.diagnostics import skip_causes

_DATA = ("x", "y", "sample_weight")
# The watch of the `fit` around.
_watch_of_fit: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "tfmix_watch_of_fit", default=None
)


class Counted(NamedTuple):
    """What an optimizer has counted until now.

    Attributes:
        applied: The number of applied steps.
        skipped: The number of skipped steps.
        of_data: Those of which the data or the loss was not finite; `None` if
            the optimizer does not know.
        overflows: For each variable, the skipped steps in which its gradient
            was not finite.
        scale: The loss scale.
        good_steps: The steps since the scale has changed.
    """

    applied: int = 0
    skipped: int = 0
    of_data: int | None = None
    overflows: Any = 0
    scale: float = 1.0
    good_steps: int = 0


def counts_of_model(model: keras.Model) -> list[Any]:
    """Lists the counts of a model's optimizers; a GAN may have several."""
    found = [
        state.counts_of(value)
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
    ]
    return [counts for counts in found if counts is not None]


def steps(optimizer: Any) -> tuple[int, int]:
    """Returns the numbers of applied and skipped steps."""
    applied = keras_variables.host_value(optimizer.applies)
    return int(applied), optimizer.skipped_steps


def _counted(optimizer: Any) -> Counted:
    applied, held = optimizer.read()
    return Counted(
        int(applied),
        int(held.skipped_steps),
        int(held.data_skips) if optimizer.counts_bad_data else None,
        held.overflow_counts,
        float(optimizer.rule.current(held.scale)),
        int(getattr(held.scale, "good_steps", 0)),
    )


# The counts of each optimizer of a model.
Counts: TypeAlias = Mapping[Any, Counted]


class SkipWatch(keras.callbacks.Callback):
    """Reads an optimizer's counts of steps once an epoch, on the host."""

    def __init__(self) -> None:
        super().__init__()
        # The positional and the keyword arguments of `fit`.
        self.arguments: tuple[tuple, dict] = ((), {})
        # Whether another watch, which the user gave to `fit`, reports.
        self._stands_back = False
        # The `History` of the run whose callbacks this watch has joined.
        self._joined: Any = None
        self._leaving = contextlib.ExitStack()
        self._reset()

    def _reset(self) -> None:
        # The counts at the ends of the last two epochs, and the lowest scale
        # until then.
        self._before: Counts = {}
        self._now: Counts | None = None
        self._lowest: dict[Any, float] = {}
        # The last epoch with skipped steps.
        self._last = skip_causes.Skips()
        self._data: Mapping[str, Any] = {}
        self._bad_rows: list[_bad_rows.BadRows] | None = None
        # The kind of cause that was reported last.
        self._cause = ""

    def join(self, model: keras.Model) -> None:
        """Joins the callbacks of the `fit` that has just begun.

        None of them was called yet. The arguments of `fit` stay as they came,
        because a function that others have put in its place may take no
        callbacks.
        """
        # Keras adds this callback to all others.
        history: Any = getattr(model, "history", None)
        if self._joined is history:
            return
        self._joined = history
        self.set_params(history.params)
        self.set_model(model)
        self._reset()
        for name in ("on_epoch_begin", "on_epoch_end", "on_train_end"):
            both = getattr(self, name), getattr(history, name)
            call = functools.partial(_call_both, *both)
            replacing.swap(self._leaving, history, name, call)

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets an earlier run."""
        self._reset()
        around = _watch_of_fit.get()
        if around is not None and around is not self:
            around._stands_back = True
            self.arguments = around.arguments

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads the counts before the first epoch."""
        if self._now is None:
            # Other callbacks may restore a run in `on_train_begin`.
            self._now = self._count()
        self._before = self._now

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reports how many steps were skipped, and the likeliest cause."""
        if self._stands_back:
            return
        self._now = self._count()
        none = Counted()
        if any(
            count.skipped > self._before.get(optimizer, none).skipped
            for optimizer, count in self._now.items()
        ):
            self._last = skips = self._skips(self._now)
            if skips.are_news:
                loss = (logs or {}).get("loss", math.nan)
                self._report(epoch + 1, skips, loss)
        for optimizer, count in self._now.items():
            lowest = self._lowest.get(optimizer, math.inf)
            self._lowest[optimizer] = min(lowest, count.scale)

    def on_train_end(self, logs: Any = None) -> None:
        """Leaves the callbacks."""
        self._leaving.close()

    def _report(
        self, epoch: int, skips: skip_causes.Skips, loss: float
    ) -> None:
        cause = self.cause(loss)
        warn(
            self,
            "%d of %d steps of epoch %d %s skipped: %s",
            skips.skipped,
            skips.applied + skips.skipped,
            epoch,
            "was" if skips.skipped == 1 else "were",
            "as before" if cause.kind == self._cause else cause.text,
        )
        self._cause = cause.kind

    def _count(self) -> Counts:
        # Reading `self.model` updates the variables on JAX.
        every = counts_of_model(self.model)
        return {optimizer: _counted(optimizer) for optimizer in every}

    def _optimizers(self) -> list[Any]:
        """Lists the optimizers that skip steps; a model may have several."""
        every = counts_of_model(self.model)
        # A model with its own optimizers may never use that of `compile`.
        stepped = [x for x in every if any(steps(x))]
        return stepped or every

    def _skips(self, now: Counts) -> skip_causes.Skips:
        """Returns the steps since the end of the last epoch."""
        return _total(
            _skips_of(
                optimizer,
                # Optimizers that the model holds exist from their first step
                # on.
                self._before.get(optimizer, Counted(scale=count.scale)),
                count,
                self._lowest.get(optimizer, math.inf),
            )
            for optimizer, count in now.items()
        )

    def cause(self, loss: float = math.nan) -> skip_causes.Cause:
        """Measures why steps of an epoch are skipped.

        Args:
            loss: The loss in the epoch's logs; NaN if unknown.
        """
        skips = self._skips(self._count())
        if not skips.skipped:
            skips = self._last
        of_call = functools.partial(
            layers.argument, training.ORDERS["fit"], *self.arguments
        )
        if self._bad_rows is None:
            given = {name: of_call(name) for name in _DATA}
            self._data = skip_causes.arrays(given)
            self._bad_rows = _bad_rows.find(self._data)
        size = of_call("batch_size")
        return skip_causes.of_skips(
            self.model, self._data, self._bad_rows, size, loss, skips
        )


def warn(callback: keras.callbacks.Callback, text: str, *values: Any) -> None:
    """Logs a warning, on a new line if the progress bar is shown."""
    if (callback.params or {}).get("verbose") in (1, "auto"):
        print(flush=True)
    _messages.warn(text, *values)


def _total(every: Iterable[skip_causes.Skips]) -> skip_causes.Skips:
    """Returns the steps of several optimizers together."""
    every = [skips for skips in every if skips.applied or skips.skipped]
    of_data = [skips.of_data for skips in every if skips.skipped]
    return skip_causes.Skips(
        sum(skips.applied for skips in every),
        sum(skips.skipped for skips in every),
        None if None in of_data else sum(x or 0 for x in of_data),
        sum(skips.unexplained for skips in every),
        dict(pair for skips in every for pair in skips.overflows.items()),
        next((skips.fall for skips in every if skips.fall), None),
        all(skips.begin_last for skips in every if skips.skipped),
    )


def _skips_of(
    optimizer: Any, before: Counted, now: Counted, lowest: float
) -> skip_causes.Skips:
    """Returns the steps of one optimizer between two moments."""
    rule = optimizer.rule
    applied, skipped = (
        now.applied - before.applied,
        now.skipped - before.skipped,
    )
    of_data = now.of_data
    if of_data is not None:
        of_data -= before.of_data or 0
    overflowed = skipped - (of_data or 0)
    # Each growth of the scale is a trial that may cost a step, in this epoch or
    # a later one. Rules of the user's own need not have these settings.
    trials = (before.good_steps + applied) // getattr(
        rule, "growth_steps", math.inf
    )
    factor = getattr(rule, "backoff_factor", 0.5)
    lowest = min(lowest, before.scale)
    trials += round(math.log(lowest / before.scale, factor))
    unexplained = overflowed - trials * getattr(rule, "hysteresis", 1)
    falls = rule.lowest_scale < now.scale < before.scale
    counts = np.ravel(now.overflows - before.overflows).tolist()
    overflows = dict(zip(optimizer.overflow_counts, counts, strict=False))
    last = counts[-1] if overflows else 0
    return skip_causes.Skips(
        applied,
        skipped,
        of_data,
        max(int(unexplained), 0),
        overflows,
        (before.scale, now.scale) if falls else None,
        begin_last=last == skipped and not falls,
    )


def fit(model: keras.Model, fit: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a model's `fit` with a watch around."""
    watch = SkipWatch()
    watch.arguments = args, kwargs
    token = _watch_of_fit.set(watch)
    try:
        return fit(*args, **kwargs)
    finally:
        _watch_of_fit.reset(token)
        watch.on_train_end()


def begin(model: keras.Model, make: Callable, *args: Any, **kwargs: Any) -> Any:
    """Makes a model's step; lets the watch join the callbacks.

    These exist by now. Code of the user's may also call the `fit` of the
    model's class.
    """
    made = make(*args, **kwargs)
    watch = _watch_of_fit.get()
    history = getattr(model, "history", None)
    # That of an earlier run, which a single step would find, has entries.
    if watch is None and getattr(history, "history", None) == {}:
        watch = SkipWatch()
    if watch is not None:
        watch.join(model)
    return made


def _call_both(
    first: Callable, second: Callable, *args: Any, **kwargs: Any
) -> None:
    """Calls two callbacks, one after the other."""
    first(*args, **kwargs)
    second(*args, **kwargs)
