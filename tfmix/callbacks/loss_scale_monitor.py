"""Shows the loss scale and the skipped steps while a model trains."""

import os
import threading
from typing import Any

import keras
from absl import logging

from tfmix import _arguments
from tfmix.callbacks import scale_log, tensorboard_file
from tfmix.doctor import missing_scaler


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
        self.every = _arguments.count("every", every)
        self.max_consecutive_skips = _arguments.count(
            "max_consecutive_skips", max_consecutive_skips
        )
        self.alarm_after = _arguments.count(
            "alarm_after",
            max_consecutive_skips if alarm_after is None else alarm_after,
        )
        self.log_dir = log_dir
        self.timeline: list[scale_log.Reading] = []
        self._step = 0
        self._shown: dict[str, float] = {}
        self._watched: Any = None
        self._epoch_start = 0
        self._last_batch = -1
        self._lock = threading.Lock()
        self._file: tensorboard_file.EventFile | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the optimizer and notes where the run starts."""
        self._watched = _scaling_optimizer(self.model)
        if self._watched is None:
            return
        if self.log_dir is not None:
            self._file = tensorboard_file.EventFile(self.log_dir)
        start = self._reading()
        self._scale_line = scale_log.ScaleLine(start)
        self._alarm = scale_log.Alarm(self.alarm_after, start)
        self._next_reading = self._step + self.every

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count the batches of an epoch."""
        self._epoch_start = self._step
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Reads the scale when it is time to, before the next step runs."""
        # Counted by the batch, as one call may stand for several steps
        # (`steps_per_execution`).
        self._step = self._epoch_start + batch
        if self._watched is not None and self._step >= self._next_reading:
            self._next_reading = self._step + self.every
            self._read()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Shows the last reading in the progress bar."""
        # Keras calls this from a pool of threads, not always in order.
        with self._lock:
            self._last_batch = max(self._last_batch, batch)
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the scale and puts it into the epoch's logs."""
        self._step = self._epoch_start + self._last_batch + 1
        if self._watched is None:
            return
        self._read()
        if logs is not None:
            logs.update(self._shown)

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the TensorBoard file."""
        if self._file is not None:
            self._file.close()
            self._file = None

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
        self._watched.check_health(self.max_consecutive_skips)

    def _reading(self) -> scale_log.Reading:
        # Asking for `self.model` is what brings the variables up to date on
        # JAX, where `fit` keeps them to itself during an epoch.
        optimizer = self.model.optimizer
        return scale_log.Reading(
            step=self._step,
            loss_scale=optimizer.loss_scale,
            applied_steps=int(optimizer.iterations),
            skipped_steps=optimizer.skipped_steps,
            consecutive_skips=optimizer.consecutive_skips,
        )


def _scaling_optimizer(model: Any) -> Any:
    """Returns a tfmix optimizer, or None where there is nothing to show."""
    optimizer = model.optimizer
    if hasattr(optimizer, "consecutive_skips"):
        return optimizer
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
        missing_scaler.warning(model),
    )
    return None
