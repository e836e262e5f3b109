"""Readings of the loss scale, and the lines in the log they lead to."""

import dataclasses
import time

from absl import logging

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


class ScaleLine:
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


class Alarm:
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
