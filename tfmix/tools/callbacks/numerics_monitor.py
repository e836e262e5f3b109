"""`NumericsMonitor` checks every layer's numbers on sampled steps of `fit`."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _arguments, _formats, _messages
from tfmix._keras import training
from tfmix.tools.diagnostics import (
    check,
    numerics_report,
    skip_report,
    verdicts,
)


class NumericsMonitor(keras.callbacks.Callback):
    """Names the layer at which training goes wrong, while `fit` runs.

    Before each sampled step, the model is checked on the step's batch, as
    `tfmix.check` does. The model and the training do not change. Under a
    distribution strategy, the first replica's part of the batch is checked.
    Sample weights and a `compute_loss` of your own do not count.

    The epoch's logs gain `numerics_events`, the number of faults found so far,
    and `headroom_bits`: how often the largest output of a 16-bit layer in the
    last sample can be doubled before it overflows. Put the monitor before
    `keras.callbacks.TensorBoard` in the list of callbacks, so that it writes
    both.

    Args:
        every: Integer, steps between two samples; the first step is sampled.
            Defaults to `1000`: a sample takes as long as a `tfmix.check`, which
            is seconds, or a minute for a large model.

    Attributes:
        events: List of `Event` (`step`, `layer`, `phase`, `verdict`): the
            worst fault of each sampled step that has one. A gradient that is
            only inaccurate is none.
        report: The `NumericsReport` of the last sample; `None` before the
            first.

    Raises:
        TypeError: If `every` is not an integer.
        ValueError: If `every` is below 1.

    Examples:
        >>> NumericsMonitor(every=10).events
        []
    """

    def __init__(self, every: int = 1000) -> None:
        super().__init__()
        self.every = _arguments.count("every", every, example=100)
        self.events: list[Event] = []
        self.report: numerics_report.NumericsReport | None = None
        self._step = 0
        self._tap: Tap | None = None
        self._failed = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Replaces the training function with a `Tap`."""
        model = training.model_in_step(self)
        function = model.train_function
        while isinstance(function, Tap):
            function = function.original
        self._tap = Tap(function, model, self.every, self._look, self._step)
        model.train_function = self._tap
        self._failed = False

    def on_train_end(self, logs: Any = None) -> None:
        """Restores the training function."""
        if self._tap is not None:
            self._step = self._tap.step
            training.model_in_step(self).train_function = self._tap.original
            self._tap = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the results of the samples to the epoch's logs."""
        if logs is not None and self.report is not None:
            headroom = [
                row.headroom_bits
                for row in self.report.rows
                if row.phase == verdicts.FORWARD
                and row.dtype in _formats.SIXTEEN_BIT
            ]
            logs["headroom_bits"] = min(headroom, default=math.nan)
            logs["numerics_events"] = float(len(self.events))

    def _look(self, step: int, batch: Any) -> None:
        if self._failed:
            return
        model = training.model_in_step(self)
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        try:
            self.report = check.sampled(model, x, y)
        except Exception as error:
            # A fault of the monitor must not stop the training.
            self._failed = True
            _messages.warn(
                "NumericsMonitor cannot sample this model and is off: %s: %s",
                type(error).__name__,
                error,
            )
            return
        # The gradients of a few rows may cancel out, so that little is left.
        small = verdicts.BACKWARD, verdicts.INACCURATE
        faults = self.report.faults
        for row in [x for x in faults if (x.phase, x.verdict) != small][:1]:
            self._add(step, row.layer, row.phase, row.verdict, row.sentence)

    def _add(
        self, step: int, layer: str, phase: str, verdict: str, text: str
    ) -> None:
        fault = layer, phase, verdict
        if fault not in {(x.layer, x.phase, x.verdict) for x in self.events}:
            skip_report.warn(self, "step %d: %s", step, text)
        self.events.append(Event(step, *fault))


class Tap:
    """Replaces `model.train_function`, and passes some batches to a function.

    Before a sampled step, `look` gets the step's number and its batch.
    """

    def __init__(
        self,
        original: Any,
        model: keras.Model,
        every: int,
        look: Callable[[int, Any], None],
        step: int,
    ) -> None:
        self.original, self.step = original, step
        self._model, self._every, self._look = model, every, look
        # One call runs several steps if `steps_per_execution` is above 1.
        self._stride = max(int(model.steps_per_execution), 1)
        # The first step of a run is sampled, then every multiple.
        self._next = -(-step // every) * every

    def __call__(self, *arguments: Any) -> Any:
        """Runs the training step or steps."""
        *state, batches = arguments
        if self.step < self._next:
            outputs = self.original(*state, batches)
        else:
            self._next = self.step - self.step % self._every + self._every
            batch = next(batches)
            first = keras.tree.map_structure(_first_replica, batch)
            with training.state_in_variables(self._model, *state):
                self._look(self.step, first)
            # The training step gets the batch that was taken, too.
            outputs = self.original(*state, itertools.chain([batch], batches))
        self.step += self._stride
        return outputs


def _first_replica(leaf: Any) -> Any:
    """Returns the first replica's part of an array of the batch."""
    # The class is compared by name, so that TensorFlow is not imported.
    distributed = type(leaf).__name__ in ("PerReplica", "DistributedValues")
    return leaf.values[0] if distributed else leaf


@dataclasses.dataclass(frozen=True)
class Event:
    """A fault in a sampled step.

    Attributes:
        step: The training step, from 0.
        layer: The layer that caused it, or `"loss"`; `"x"` or `"y"` for the
            data.
        phase: `"forward"`, `"backward"` or `"weights"`.
        verdict: `"overflow"`, `"underflow"`, `"inaccurate"` or
            `"not_finite"`.
    """

    step: int
    layer: str
    phase: str
    verdict: str
