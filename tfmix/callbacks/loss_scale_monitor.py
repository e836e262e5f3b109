"""Shows the loss scale and the skipped steps while a model trains."""

import collections
import dataclasses
import math
import os
import time
from typing import Any

import keras

from tfmix import _arguments, _formats, _messages
from tfmix._keras import variables
from tfmix.autocast import own_code
from tfmix.diagnostics import missing_scaler, progress_bar, skip_report
from tfmix.loss_scaling import errors, rules, standstill
from tfmix.loss_scaling import optimizer as scaling


@dataclasses.dataclass(frozen=True)
class Reading:
    """The state of loss scaling at one moment of the run.

    Attributes:
        step: Training steps that the monitor has seen.
        loss_scale: What losses are multiplied by; of several optimizers, as
            a GAN has them, the lowest.
        applied_steps: Steps applied over the optimizers' lives, all together.
        skipped_steps: Steps skipped over them.
        consecutive_skips: Steps skipped since the last one that was applied;
            of several optimizers, the most.
        gradient_norm: Of the true gradients of the last steps that were
            applied, all together; `None` if it was not asked for.
    """

    step: int
    loss_scale: float
    applied_steps: int
    skipped_steps: int
    consecutive_skips: int
    gradient_norm: float | None = None


class LossScaleMonitor(skip_report.SkipWatch):
    """Puts loss scale and skipped steps where the loss is shown.

    Add it to every `fit` with a `tfmix.LossScaleOptimizer`, or several of
    them as attributes of a model with a `train_step` of its own. A line at the
    start says what the run computes in; the progress bar and the epoch's
    logs, hence `History`, gain `loss_scale` and `skipped_steps`, the logs
    `applied_steps` as well. A run in which no step is applied any more is
    stopped with the diagnosis. Put it before `keras.callbacks.TensorBoard` and
    `CSVLogger` in the list of callbacks, which then write these numbers: Keras
    calls them in that order.

    Args:
        every: Integer, steps between two readings. A reading copies a few
            scalars to the host and waits for the running step, so it is not
            made in each. Defaults to `100`; there is one more at the end of
            each epoch.
        max_consecutive_skips: Integer, steps skipped in a row after which
            the run is stopped. Defaults to `50`: from the highest scale, 24
            halvings lead to the floor.
        alarm_after: Integer, steps without an applied update after which a
            warning is logged. Defaults to `max_consecutive_skips`.
        gradient_norm: Bool, whether to show `gradient_norm`, too: the norm of
            the last applied step's gradients, all variables and all replicas
            together, divided by the loss scale and not clipped. NaN in the
            logs of an epoch before the first such step. Each step then reads
            its gradients once more, in later calls of `fit`, too, until the
            model is compiled anew. Defaults to `False`.

    Attributes:
        timeline: List of `Reading`, which `plot` draws.
            Their steps are the optimizer's, which a resumed run goes on with;
            the first is made before the first step.

    Raises:
        TypeError: If a number is not an integer, or `gradient_norm` not a
            bool; in `fit`, if the optimizer is Keras's own loss scaler.
        ValueError: If a number is below 1; in `fit`, if `gradient_norm` is
            asked for and the optimizer accumulates gradients.
        tfmix.LossScaleError: In `fit`, when the run is stuck.

    Examples:
        >>> LossScaleMonitor(every=50).timeline
        []
    """

    # Keras keeps its asynchronous dispatch: `on_train_batch_end` below only
    # copies three numbers that the host already has.
    async_safe = True

    def __init__(
        self,
        every: int = 100,
        *,
        max_consecutive_skips: int = 50,
        alarm_after: int | None = None,
        gradient_norm: bool = False,
    ) -> None:
        super().__init__()
        self.every = _arguments.count("every", every, example=100)
        self.max_consecutive_skips = _arguments.count(
            "max_consecutive_skips", max_consecutive_skips
        )
        alarm = max_consecutive_skips if alarm_after is None else alarm_after
        self.alarm_after = _arguments.count("alarm_after", alarm)
        if not isinstance(gradient_norm, bool):
            raise TypeError(
                "`gradient_norm` must be True or False. "
                f"Received: gradient_norm={gradient_norm!r}."
            )
        self.gradient_norm = gradient_norm
        self.timeline: list[Reading] = []
        self._step = self._next_reading = self._epoch_start = 0
        self._has_scale = self._started = self._rung = False
        self._shown: dict[str, float] = {}
        # Keras adds to it from a pool of threads, not always in order.
        self._batches: collections.deque[int] = collections.deque(maxlen=1024)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws the loss scale over the steps, and where steps were skipped.

        Args:
            path: Where to write a picture. Defaults to `None`: nowhere.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ImportError: If matplotlib is missing.
            ValueError: If the monitor has been in no `fit`.
        """
        if not self.timeline:
            raise ValueError(
                "There is nothing to draw yet: this monitor was in no `fit` "
                "with a tfmix.LossScaleOptimizer. Received: timeline=[]. Call "
                "model.fit(..., callbacks=[monitor]), then monitor.plot()."
            )
        from tfmix.diagnostics import plotting

        return plotting.loss_scale_timeline(self.timeline, path)

    def set_model(self, model: keras.Model) -> None:
        """Lets the steps keep the norm, before `fit` makes its function."""
        super().set_model(model)
        if self.gradient_norm:
            with variables.strategy_scope(model):
                is_new = [
                    optimizer.keep_gradient_norm()
                    for optimizer in scaling.scalers(model)
                ]
            if any(is_new):
                model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the optimizer, and prints what the run computes in."""
        super().on_train_begin(logs)
        self._has_scale, self._started = _has_scale(self.model), False
        if self._has_scale and (self.params or {}).get("verbose"):
            print(_opening(self.model), flush=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count the batches of an epoch."""
        super().on_epoch_begin(epoch, logs)
        if self._has_scale and not self._started:
            # Not before: other callbacks restore a run as training begins.
            self._start()
        self._epoch_start = self._step
        self._batches.clear()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Reads the scale when it is time to, before the next step runs."""
        # Counted by the batch, as one call may stand for several steps
        # (`steps_per_execution`).
        self._step = self._epoch_start + batch
        if self._has_scale and self._step >= self._next_reading:
            self._next_reading = self._step + self.every
            self._read()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Shows the last reading in the progress bar."""
        self._batches.append(batch)
        if logs is not None:
            # A bar wider than the terminal leaves a line at each redraw.
            shown = {**self._shown}
            shown.pop("applied_steps", None)
            logs.update(shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the scale and puts it into the epoch's logs."""
        self._step = self._epoch_start + max(self._batches, default=-1) + 1
        if self._has_scale:
            self._read()
            if logs is not None:
                if self.gradient_norm:
                    logs["gradient_norm"] = float("nan")
                logs.update(self._shown)
        super().on_epoch_end(epoch, logs)

    def _start(self) -> None:
        made = [sum(skip_report.steps(x)) for x in self._optimizers()]
        # A critic makes several steps in one of the model's.
        self._step = max(self._step, min(made))
        start = self._reading()
        # What the next change of the scale is counted from.
        self._logged, self._quiet_until = start, 0.0
        self._last_progress, self._rung = start, False
        self._next_reading = self._step + self.every
        self._started = True
        if not self.timeline or self.timeline[-1].step != self._step:
            self._note(start)

    def _read(self) -> None:
        reading = self._reading()
        self._note(reading)
        self._log_change(reading)
        self._log_standstill(reading)
        try:
            for optimizer in self._optimizers():
                standstill.check(optimizer, self.max_consecutive_skips)
        except errors.LossScaleError as error:
            where, _, advice = str(error).partition("\n")
            cause = f"The likeliest cause, as measured: {self._why(reading)}."
            text = "\n".join([where, cause, advice])
            raise errors.LossScaleError(text) from None

    def _note(self, reading: Reading) -> None:
        self.timeline.append(reading)
        self._shown = {
            name: progress_bar.Shown(getattr(reading, name))
            for name in ("loss_scale", "applied_steps", "skipped_steps")
        }
        norm = reading.gradient_norm
        if norm is not None and not math.isnan(norm):
            self._shown["gradient_norm"] = progress_bar.Shown(norm)

    def _reading(self) -> Reading:
        # Asking for `self.model` is what brings the variables up to date on
        # JAX, where `fit` keeps them to itself during an epoch.
        optimizers = self._optimizers()
        applied, skipped = zip(*map(skip_report.steps, optimizers), strict=True)
        norm = None
        if self.gradient_norm:
            every = [optimizer.gradient_norm for optimizer in optimizers]
            known = [norm for norm in every if not math.isnan(norm)]
            norm = math.hypot(*known) if known else math.nan
        return Reading(
            self._step,
            min(optimizer.loss_scale for optimizer in optimizers),
            sum(applied),
            sum(skipped),
            max(optimizer.consecutive_skips for optimizer in optimizers),
            norm,
        )

    def _log_change(self, now: Reading) -> None:
        """Logs a line if the scale has changed and the log is not busy."""
        last, seconds = self._logged, time.monotonic()
        if now.loss_scale == last.loss_scale or seconds < self._quiet_until:
            return
        # A start that burns ten steps is one line in ten seconds, not ten.
        self._logged, self._quiet_until = now, seconds + 10.0
        _messages.info(
            "Loss scale %g -> %g by step %d; %d step(s) skipped since step %d.",
            last.loss_scale,
            now.loss_scale,
            now.step,
            now.skipped_steps - last.skipped_steps,
            last.step,
        )

    def _log_standstill(self, now: Reading) -> None:
        """Logs a warning, once, when no step has been applied for a while."""
        if now.applied_steps != self._last_progress.applied_steps:
            self._last_progress, self._rung = now, False
            return
        waited = now.step - self._last_progress.step
        if waited >= self.alarm_after and not self._rung:
            self._rung = self._told = True
            progress_bar.warn(
                self,
                "no update was applied in the last %d steps, at a loss scale "
                "of %g: %s",
                waited,
                now.loss_scale,
                self._why(now),
            )

    def _why(self, now: Reading) -> str:
        in_epoch = now.step - self._epoch_start
        return self.cause(min(in_epoch, now.consecutive_skips)).text


def _opening(model: keras.Model) -> str:
    """Says in one line what a run computes in, and how it scales the loss."""
    layers = own_code.layers_that_compute(model)
    sixteen = [
        layer for layer in layers if layer.compute_dtype in _formats.SIXTEEN_BIT
    ]
    names = sorted({layer.dtype_policy.name for layer in sixteen})
    optimizer = scaling.scalers(model)[0]
    rule, scale = optimizer.rule, optimizer.loss_scale
    fraction, power = math.frexp(scale)
    size = f"2^{power - 1}" if fraction == 0.5 else f"{scale:g}"
    said = _RULES.get(type(rule), type(rule).__name__ + " {}").format(size)
    policy = " and ".join(names) or _formats.FLOAT32.name
    return f"{policy}: {len(sixteen)} of {len(layers)} layers in 16 bit; {said}"


# What the line at the start of a run says of a rule.
_RULES: dict[type, str] = {
    rules.DynamicLossScale: "dynamic scale {}",
    rules.FixedLossScale: "fixed scale {}",
    rules.NoLossScale: "no loss scale",
}


def _has_scale(model: keras.Model) -> bool:
    """Says whether a model has tfmix's optimizer; warns where it has none."""
    optimizer = getattr(model, "optimizer", None)
    if scaling.scalers(model):
        return True
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "LossScaleMonitor needs tfmix.LossScaleOptimizer, which counts "
            "the steps it skips; Keras's own class does not. Received: "
            f"model.optimizer={optimizer!r}. Compile with "
            "tfmix.LossScaleOptimizer(inner_optimizer)."
        )
    text = (
        "LossScaleMonitor has nothing to show: the model was compiled "
        f"without loss scaling (its optimizer is {type(optimizer).__name__}). "
        + missing_scaler.warning(model)
    )
    _messages.warn(text.rstrip())
    return False
