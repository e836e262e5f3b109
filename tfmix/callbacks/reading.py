"""A sample of a training step, read: rows, and what went wrong first."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfmix import _formats
from tfmix.callbacks import sampler
from tfmix.doctor import gaps, latent, probe, ranges, verdicts


@dataclasses.dataclass(frozen=True)
class Event:
    """A fault in a sampled step."""

    step: int  # from 0
    layer: str  # that made it, or `"loss"`
    phase: str  # `"forward"` or `"backward"`
    verdict: str  # as in `doctor.verdicts`


@dataclasses.dataclass(frozen=True)
class TensorRanges:
    """One tensor of one sampled step."""

    layer: str  # the layer's name; the path of a weight
    # `"forward"` for outputs, `"backward"` for their gradients, `"weights"` or
    # `"weight_gradients"`. Gradients are multiplied by the loss scale.
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
        severe = (verdicts.OVERFLOW, verdicts.NOT_FINITE)
        hard = [one for one in faults.items() if one[1] in severe]
        if faults:
            return (hard or list(faults.items()))[0]
        for call, row in zip(sample.calls, sample.forward, strict=True):
            if not_finite(row):
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
        for index, call in reversed(list(enumerate(sample.calls))):
            sixteen = call.dtype in _formats.SIXTEEN_BIT
            if sixteen and bad(sample.backward[index]):
                return self._user(index, sample)
            if self._weights_bad(call.target, sample, bad):
                return self._name(call.target)
        return None

    def _user(self, index: int, sample: sampler.Sample) -> str:
        """Names the layer that computed the gradient of a call's output."""
        uses = [use for use in sample.uses if use.maker == index]
        # The first use has no share; those above the room for them have none.
        known = [use for use in uses if use.share in range(len(sample.shares))]
        bad = [use for use in known if not_finite(sample.shares[use.share])]
        if uses:
            return self._name((bad or uses)[0].target)
        # Something else, such as a cast, lies in between: the next layer in
        # the order of calls whose inputs may come from there.
        for call in sample.calls[index + 1 :]:
            if not call.inputs_known:
                return self._name(call.target)
        return verdicts.LOSS

    def _name(self, target: int) -> str:
        is_loss = target == sampler.LOSS
        return verdicts.LOSS if is_loss else self.found[target].name

    def overflow(self, sample: sampler.Sample) -> str | None:
        """Returns the layer whose gradients overflow first, going back.

        A loss that is itself out of the format's range, a sum over pixels
        for instance, is the reason for all that overflow behind it.
        """
        layer = self.backward(sample, not_finite)
        return (
            verdicts.LOSS
            if layer and abs(sample.loss) > self.limits.max
            else layer
        )

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
        return self.underflow(kept)

    def underflow(self, sample: sampler.Sample) -> str | None:
        """Returns the layer whose gradients vanish first, going back."""

        def vanished(row: Any) -> bool:
            # Below four bits a gradient is noise.
            small = _column(row, "largest") < 16 * self.limits.smallest
            return small and not not_finite(row)

        return self.backward(sample, vanished)

    def _weights_bad(
        self, index: int, sample: sampler.Sample, bad: Callable[[Any], bool]
    ) -> bool:
        target = self.found[index]
        if not target.whole:
            return False
        paths = {variable.path for variable in target.weights}
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
        gap = gaps.Gap(
            float(error),
            cosine=1.0,
            lost=not math.isfinite(error),
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


def _column(row: Any, name: str) -> float:
    return float(row[ranges.COLUMNS.index(name)])
