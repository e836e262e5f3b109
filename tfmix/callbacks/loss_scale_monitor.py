"""Shows the loss scale and the skipped steps while a model trains."""

import collections
import dataclasses
import os
import time
from typing import Any

import keras
from absl import logging

from tfmix import _arguments
from tfmix.callbacks import tensorboard_file
from tfmix.policy.in_force import suited_optimizer

# Seconds between two lines about the scale: a start that burns ten steps is
# one line, not ten.
_QUIET_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Reading:
    """The state of loss scaling at one moment of the run.

    Attributes:
        step: Training steps seen by the monitor.
        loss_scale: The loss scale in force.
        applied_steps: Steps applied to the weights, over the optimizer's life.
        skipped_steps: Steps skipped, over the optimizer's life.
        consecutive_skips: Steps skipped since the last one applied.
    """

    step: int
    loss_scale: float
    applied_steps: int
    skipped_steps: int
    consecutive_skips: int


class LossScaleMonitor(keras.callbacks.Callback):
    """Puts loss scale and skipped steps where the loss is shown.

    Add it to every `fit` with a `tfmix.LossScaleOptimizer`. The progress bar
    and the epoch's logs, hence `History`, gain `loss_scale`, `applied_steps`
    and `skipped_steps`. A run in which no step is applied any more is
    stopped with the diagnosis. Put it before `keras.callbacks.CSVLogger` in
    the list of callbacks: Keras calls them in that order.

    Args:
        every: Integer, steps between two readings. A reading copies four
            scalars to the host and waits for the running step, so it is not
            made in each. Defaults to `100`; there is one more at the end of
            each epoch.
        max_consecutive_skips: Integer, steps skipped in a row after which
            the run is stopped. Defaults to `50`: from the highest scale, 24
            halvings lead to the floor.
        alarm_after: Integer, steps without an applied update after which a
            warning is logged. Defaults to `max_consecutive_skips`.
        log_dir: Path of a directory for TensorBoard files. Defaults to
            `None`, no files.

    Attributes:
        timeline: List of `Reading`, for `tfmix.plotting.loss_scale_timeline`.
            Their steps are the optimizer's, which a resumed run goes on with.

    Raises:
        TypeError: If a number is not an integer, or `log_dir` is not a path;
            in `fit`, if the optimizer is Keras's own loss scaler.
        ValueError: If a number is below 1, or `log_dir` is given on a backend
            other than TensorFlow.
        tfmix.LossScaleError: In `fit`, when the run is stuck.

    Example:
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
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Checks the arguments; reads nothing yet."""
        super().__init__()
        if log_dir is not None:
            tensorboard_file.refuse_other_backends(log_dir)
        self.every = _arguments.count("every", every, example=100)
        self.max_consecutive_skips = _arguments.count(
            "max_consecutive_skips", max_consecutive_skips
        )
        self.alarm_after = _arguments.count(
            "alarm_after",
            max_consecutive_skips if alarm_after is None else alarm_after,
        )
        self.log_dir = log_dir
        self.timeline: list[Reading] = []
        self._step = 0
        self._shown: dict[str, float] = {}
        self._has_scale = False
        self._next_reading = 0
        self._started = False
        self._epoch_start = 0
        # Keras adds to it from a pool of threads, not always in order.
        self._batches: collections.deque[int] = collections.deque(maxlen=1024)
        self._file: tensorboard_file.EventFile | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the optimizer, and opens the TensorBoard file."""
        self._has_scale = _has_scale(self.model)
        self._started = False
        if self._has_scale and self.log_dir is not None:
            self._file = tensorboard_file.EventFile(self.log_dir)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count the batches of an epoch."""
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
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the scale and puts it into the epoch's logs."""
        self._step = self._epoch_start + max(self._batches, default=-1) + 1
        if not self._has_scale:
            return
        self._read()
        if logs is not None:
            logs.update(self._shown)

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the TensorBoard file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _start(self) -> None:
        start = self._reading()
        self._step = max(self._step, start.applied_steps + start.skipped_steps)
        start = dataclasses.replace(start, step=self._step)
        self._scale_line = _ScaleLine(start)
        self._alarm = _Alarm(self.alarm_after, start)
        self._next_reading = self._step + self.every
        self._started = True

    def _read(self) -> None:
        reading = self._reading()
        self.timeline.append(reading)
        self._shown = {
            "loss_scale": reading.loss_scale,
            "applied_steps": reading.applied_steps,
            "skipped_steps": reading.skipped_steps,
        }
        if self._file is not None:
            self._file.write(reading.step, self._shown)
        self._scale_line.update(reading)
        self._alarm.update(reading)
        self.model.optimizer.check_health(self.max_consecutive_skips)

    def _reading(self) -> Reading:
        # Asking for `self.model` is what brings the variables up to date on
        # JAX, where `fit` keeps them to itself during an epoch.
        optimizer = self.model.optimizer
        iterations = keras.ops.convert_to_numpy(optimizer.iterations)
        return Reading(
            step=self._step,
            loss_scale=optimizer.loss_scale,
            applied_steps=int(iterations),
            skipped_steps=optimizer.skipped_steps,
            consecutive_skips=optimizer.consecutive_skips,
        )


class _ScaleLine:
    """Logs changes of the loss scale, seldom more than one line at a time."""

    def __init__(self, start: Reading) -> None:
        """Takes the reading that the first change is counted from."""
        self._last = start
        self._quiet_until = 0.0

    def update(self, now: Reading) -> None:
        """Logs a line if the scale has changed and the log is not busy."""
        last = self._last
        if now.loss_scale == last.loss_scale:
            return
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + _QUIET_SECONDS
        self._last = now
        level = (
            logging.WARNING
            if now.loss_scale < last.loss_scale
            else logging.INFO
        )
        logging.log(
            level,
            "Loss scale %g -> %g by step %d; %d step(s) skipped since step %d.",
            last.loss_scale,
            now.loss_scale,
            now.step,
            now.skipped_steps - last.skipped_steps,
            last.step,
        )


class _Alarm:
    """Logs a warning when no step has been applied for a while."""

    def __init__(self, alarm_after: int, start: Reading) -> None:
        """Takes the number of steps to wait and the reading to start at."""
        self._alarm_after = alarm_after
        self._last_progress = start
        self._rung = False

    def update(self, now: Reading) -> None:
        """Logs a warning if it is time to, once for each standstill."""
        if now.applied_steps != self._last_progress.applied_steps:
            self._last_progress = now
            self._rung = False
            return
        waited = now.step - self._last_progress.step
        if waited >= self._alarm_after and not self._rung:
            self._rung = True
            logging.warning(
                "No update was applied in the last %d steps: the loss scale "
                "is %g, %d step(s) were skipped in a row. "
                "optimizer.check_health() names the variables.",
                waited,
                now.loss_scale,
                now.consecutive_skips,
            )


def _has_scale(model: keras.Model) -> bool:
    """Says whether a model has tfmix's optimizer; warns where it has none."""
    optimizer = model.optimizer
    if hasattr(optimizer, "consecutive_skips"):
        return True
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "LossScaleMonitor needs tfmix.LossScaleOptimizer, which counts "
            "the steps it skips; Keras's own class does not. Received: "
            f"model.optimizer={optimizer!r}. Compile with "
            "tfmix.LossScaleOptimizer(inner_optimizer)."
        )
    logging.warning(
        "LossScaleMonitor has nothing to show: the model was compiled "
        "without loss scaling (its optimizer is %s). %s",
        type(optimizer).__name__,
        suited_optimizer.missing_scaler_warning(model),
    )
    return False
