"""A sample of a training step, read: rows, and what went wrong first."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfmix import _formats
from tfmix.callbacks import sampler
from tfmix.doctor import gaps, latent, probe, ranges, verdicts

# Below four bits a gradient is noise.
_DIGITS = 16


@dataclasses.dataclass(frozen=True)
class Event:
    """A fault in a sampled step.

    Attributes:
        step: The training step, from 0.
        layer: The layer that made it, or `"loss"`.
        phase: `"forward"` or `"backward"`.
        verdict: `"overflow"`, `"underflow"`, `"inaccurate"` or
            `"not_finite"`.
    """

    step: int
    layer: str
    phase: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class TensorRanges:
    """One tensor of one sampled step.

    Attributes:
        layer: The layer's name; the path of a weight.
        phase: `"forward"` for outputs, `"backward"` for their gradients,
            `"weights"`, or `"weight_gradients"`. Gradients are measured as
            they are, multiplied by the loss scale.
        measures: Where its values lie in the format.
    """

    layer: str
    phase: str
    measures: ranges.Measures


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """Reads the samples of one model."""

    found: Sequence[probe.Target]
    # Paths of the trainable weights.
    variables: Sequence[str]
    limits: _formats.Format

    def rows(self, sample: sampler.Sample) -> list[TensorRanges]:
        """Returns a row for every tensor of a sample."""
        names = [self.found[call.target].name for call in sample.calls]
        tables = [
            (names, "forward", sample.forward[:, : len(ranges.COLUMNS)]),
            (names, "backward", sample.backward),
            (self.variables, "weights", sample.weights),
            (self.variables, "weight_gradients", sample.gradients),
        ]
        return [
            TensorRanges(name, phase, ranges.from_vector(row, self.limits))
            for layers, phase, table in tables
            for name, row in zip(layers, table, strict=True)
        ]

    def forward(self, sample: sampler.Sample) -> tuple[str, str] | None:
        """Returns layer and verdict of the first fault of the forward pass."""
        faults: dict[str, str] = {}
        # A layer is not blamed for the layers inside it, which end first.
        cleared: set[str] = set()
        for call, row in zip(sample.calls, sample.forward, strict=True):
            target = self.found[call.target]
            verdict = self._own_fault(call, row)
            if verdict != verdicts.OK and target.name not in cleared:
                faults.setdefault(target.name, verdict)
                cleared.update(target.inside)
        if faults:
            severe = (verdicts.OVERFLOW, verdicts.NOT_FINITE)
            hard = [one for one in faults.items() if one[1] in severe]
            return (hard or list(faults.items()))[0]
        for call, row in zip(sample.calls, sample.forward, strict=True):
            if _column(row, "not_finite") > 0:
                # Its input or its weights are not finite themselves.
                return self.found[call.target].name, verdicts.NOT_FINITE
        return None

    def backward(
        self, sample: sampler.Sample, bad: Callable[[Any], bool]
    ) -> str | None:
        """Returns the layer whose gradients are bad first, going back.

        `bad` judges a row of `backward` or `gradients`. The layer is the one
        that computed them, `"loss"` if that is the loss, None if none are bad.
        """
        for index in reversed(range(len(sample.calls))):
            call = sample.calls[index]
            sixteen = call.dtype in _formats.SIXTEEN_BIT
            if sixteen and bad(sample.backward[index]):
                return self._user(index, sample)
            target = self.found[call.target]
            if self._weights_bad(target, sample, bad):
                return target.name
        return None

    def _user(self, index: int, sample: sampler.Sample) -> str:
        """Names the layer that computed the gradient of a call's output."""
        uses = [use for use in sample.uses if use.maker == index]
        for use in uses:
            share = use.share
            if share is not None and share < len(sample.shares):
                if not_finite(sample.shares[share]):
                    return self._name(use.target)
        if uses:
            return self._name(uses[0].target)
        # Something else, such as a cast, lies in between: the next layer in
        # the order of calls whose inputs may come from there.
        for call in sample.calls[index + 1 :]:
            if not call.inputs_known:
                return self._name(call.target)
        return verdicts.LOSS

    def _name(self, target: int) -> str:
        return (
            verdicts.LOSS if target == sampler.LOSS else self.found[target].name
        )

    def overflow(self, sample: sampler.Sample) -> str | None:
        """Returns the layer whose gradients overflow first, going back.

        A loss that is itself out of the format's range, a sum over pixels
        for instance, is the reason for all that overflow behind it.
        """
        layer = self.backward(sample, not_finite)
        if layer is not None and abs(sample.loss) > self.limits.max:
            return verdicts.LOSS
        return layer

    def lost(self, sample: sampler.Sample, exact: sampler.Sample) -> str | None:
        """Returns the layer, going back, that loses a whole gradient.

        None if what vanished is zero in `exact`, the step in float32, too.
        """
        largest = ranges.COLUMNS.index("largest")

        def known(rows: np.ndarray, right: np.ndarray) -> np.ndarray:
            # An infinity is not a value that vanished.
            return np.where(right[:, [largest]] > 0.0, rows, np.inf)

        kept = dataclasses.replace(
            sample,
            backward=known(sample.backward, exact.backward),
            gradients=known(sample.gradients, exact.gradients),
        )
        return self.backward(kept, vanished(self.limits))

    def _weights_bad(
        self,
        target: probe.Target,
        sample: sampler.Sample,
        bad: Callable[[Any], bool],
    ) -> bool:
        if not target.whole:
            return False
        paths = {
            variable.path
            for layer in target.layers
            for variable in layer.trainable_variables
        }
        named = zip(self.variables, sample.gradients, strict=True)
        rows = [row for path, row in named if path in paths]
        # One that overflowed is a fault; one that is zero, a bias before a
        # normalisation perhaps, is none.
        overflowed = any(map(not_finite, rows)) and any(map(bad, rows))
        return overflowed or (bool(rows) and all(map(bad, rows)))

    def _own_fault(self, call: sampler.Call, row: Any) -> str:
        measured = ranges.from_vector(row[: len(ranges.COLUMNS)], self.limits)
        error, broken, head = row[len(ranges.COLUMNS) :]
        if broken:
            return verdicts.OK
        lost = not math.isfinite(error)
        gap = gaps.Gap(
            relative_error=float(error),
            cosine=1.0,
            lost=lost,
            only_nan=False,
            broken=False,
            flushed=measured.zero if error >= 1 else 0.0,
            subnormal=measured.subnormal,
            headroom_bits=measured.headroom_bits,
        )
        verdict = verdicts.of_output(gap, self.limits)
        low = measured.subnormal + measured.zero > latent.LOW_SHARE
        sixteen = call.dtype in _formats.SIXTEEN_BIT
        if verdict == verdicts.OK and head and sixteen and low:
            return verdicts.UNDERFLOW
        return verdict


def not_finite(row: Any) -> bool:
    """Says of a row of measures whether an entry was not finite."""
    return _column(row, "not_finite") > 0


def vanished(limits: _formats.Format) -> Callable[[Any], bool]:
    """Returns what says of a row whether its entries have lost all digits."""

    def check(row: Any) -> bool:
        largest = _column(row, "largest")
        return largest < _DIGITS * limits.smallest and not not_finite(row)

    return check


def _column(row: Any, name: str) -> float:
    return float(row[ranges.COLUMNS.index(name)])
