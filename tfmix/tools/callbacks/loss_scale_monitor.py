"""Shows the loss scale and the skipped steps while a model trains."""

import dataclasses
from typing import Any

import keras

from tfmix import _arguments, _messages
from tfmix.loss_scaling import errors, standstill
from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.diagnostics import skip_report


@dataclasses.dataclass(frozen=True)
class Reading:
    """The state of loss scaling at one moment of the run.

    Attributes:
        step: Steps of the optimizer, which continue when a run is resumed;
            with several optimizers, the fewest.
        loss_scale: The optimizer's loss scale; with several optimizers, as in
            a GAN, the lowest.
        applied_steps: Steps applied since the optimizers were created, all
            optimizers together.
        skipped_steps: Steps skipped in that time.
        consecutive_skips: Steps skipped since the last applied one; with
            several optimizers, the most.
    """

    step: int
    loss_scale: float
    applied_steps: int
    skipped_steps: int
    consecutive_skips: int


class LossScaleMonitor(skip_report.SkipWatch):
    """Shows the loss scale and the skipped steps next to the loss.

    Add it to every `fit` with a `tfmix.LossScaleOptimizer`, or with a model
    that has several of them as attributes and its own `train_step`. The
    progress bar and the epoch's logs, and so `History`, gain `loss_scale` and
    `skipped_steps`; the logs gain `applied_steps` as well. A run that no longer
    applies any step is stopped with a diagnosis. Put the monitor before
    `keras.callbacks.TensorBoard` and `CSVLogger` in the list of callbacks, so
    that they write these numbers: Keras calls callbacks in that order.

    Args:
        every: Integer, steps between two readings. A reading copies a few
            scalars to the host and waits for the running step, so it is not
            taken in every step. Defaults to `100`; one more is taken at the
            end of each epoch.
        max_consecutive_skips: Integer, skipped steps in a row after which
            the run is stopped. Defaults to `50`: it takes 24 halvings to get
            from the highest scale to the lowest.

    Attributes:
        timeline: List of `Reading`. The first is taken before the first step.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is below 1.
        tfmix.LossScaleError: In `fit`, when the run is stuck.

    Examples:
        >>> LossScaleMonitor(every=50).timeline
        []
    """

    # This keeps Keras's dispatch asynchronous: `on_train_batch_end` below only
    # copies three numbers that are on the host already.
    async_safe = True

    def __init__(
        self,
        every: int = 100,
        *,
        max_consecutive_skips: int = 50,
    ) -> None:
        super().__init__()
        self.every = _arguments.count("every", every, example=100)
        self.max_consecutive_skips = _arguments.count(
            "max_consecutive_skips", max_consecutive_skips
        )
        self.timeline: list[Reading] = []
        self._next_reading = 0
        self._has_scale = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the optimizer."""
        super().on_train_begin(logs)
        self._has_scale = _has_scale(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count the batches of an epoch."""
        super().on_epoch_begin(epoch, logs)
        # The end of an epoch before has a reading.
        self._next_reading = self.every if self.timeline else 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Takes a reading if one is due, before the next step runs."""
        # The batch number counts steps: one call of this method may stand for
        # several steps (`steps_per_execution`).
        if self._has_scale and batch >= self._next_reading:
            self._next_reading = batch + self.every
            self._read()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Shows the last reading in the progress bar."""
        if self.timeline and logs is not None:
            # A bar wider than the terminal leaves a line at each redraw.
            shown = self._numbers("loss_scale", "skipped_steps")
            logs.update(shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Takes a reading, and adds it to the epoch's logs."""
        if self._has_scale:
            self._read()
            if logs is not None:
                names = "loss_scale", "applied_steps", "skipped_steps"
                logs.update(self._numbers(*names))
        super().on_epoch_end(epoch, logs)

    def _read(self) -> None:
        reading = self._reading()
        if not self.timeline or self.timeline[-1] != reading:
            self.timeline.append(reading)
        try:
            for optimizer in self._optimizers():
                standstill.check(optimizer, self.max_consecutive_skips)
        except errors.LossScaleError as error:
            where, _, advice = str(error).partition("\n")
            cause = f"The likeliest cause, as measured: {self.cause().text}."
            text = "\n".join([where, cause, advice])
            raise errors.LossScaleError(text) from None

    def _numbers(self, *names: str) -> dict[str, float]:
        """Returns numbers of the last reading."""
        last = self.timeline[-1]
        return {name: float(getattr(last, name)) for name in names}

    def _reading(self) -> Reading:
        # Reading `self.model` updates the variables on JAX, where `fit` does
        # not write them during an epoch.
        optimizers = self._optimizers()
        applied, skipped = zip(*map(skip_report.steps, optimizers), strict=True)
        return Reading(
            min(map(sum, zip(applied, skipped, strict=True))),
            min(optimizer.loss_scale for optimizer in optimizers),
            sum(applied),
            sum(skipped),
            max(optimizer.consecutive_skips for optimizer in optimizers),
        )


def _has_scale(model: keras.Model) -> bool:
    """Returns whether a model has tfmix's optimizer; warns if it does not."""
    held = vars(model).values()
    if any(isinstance(value, scaling.LossScaleOptimizer) for value in held):
        return True
    _messages.warn(
        "LossScaleMonitor has nothing to show: the model was compiled without "
        "tfmix.LossScaleOptimizer (its optimizer is %s).",
        type(getattr(model, "optimizer", None)).__name__,
    )
    return False
