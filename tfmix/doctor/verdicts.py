"""What a measured gap means: a verdict, and how it ranks among others."""

import dataclasses
import math

from tfmix import _formats
from tfmix.doctor import gaps as compare
from tfmix.doctor import one_layer

OK = "ok"
OVERFLOW = "overflow"
UNDERFLOW = "underflow"
INACCURATE = "inaccurate"
NOT_FINITE = "not_finite"

FORWARD = "forward"
BACKWARD = "backward"
WEIGHTS = "weights"

LOSS = "loss"

# Norm of the error over norm of the result. One rounding costs 0.0003 in
# float16, 0.002 in bfloat16; healthy layers stayed below 0.001 and 0.006.
FORWARD_TOLERANCES = {"float16": 0.01, "bfloat16": 0.08}
# Gradients of weights are long sums, which a CPU makes in 16 bit: 0.3 and 0.6
# were seen in layers that train well.
BACKWARD_TOLERANCES = {"float16": 0.25, "bfloat16": 0.5}
# Such sums keep their direction, with a cosine of 0.96 in that of 0.3; a step
# needs no more.
_SAME_DIRECTION = {"float16": 0.95, "bfloat16": 0.8}

# Most of a tensor below the normal range is underflow, whatever else it is.
_MOST = 0.5
# An error above this is more than that of numbers rounded to full precision.
_ROUNDING = 0.01
# Below the normal range digits go with every layer further down.
_LOW_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is known about one layer in one phase.

    Attributes:
        layer: Name of the layer, or `"loss"`.
        phase: `"forward"`, `"backward"` or `"weights"`.
        verdict: One of the five verdicts.
        gap: The numbers.
        order: Rank of the layer in the order of computation.
        given: Whether what the layer was given does not fit into 16 bits, so
            that the fault may come from elsewhere.
        latent: Whether the fault is known from the layer's making and did
            not show on this batch.
        note: What was seen, in words.
        was_low: Whether most of the gradient it was given lies below the
            normal range already.
    """

    layer: str
    phase: str
    verdict: str
    gap: compare.Gap
    order: int = 0
    given: bool = False
    latent: bool = False
    note: str = ""
    was_low: bool = False

    @property
    def opens_underflow(self) -> bool:
        """Whether it turns a gradient in range into one mostly below it."""
        return (
            self.phase == BACKWARD
            and _is_low(self.gap)
            and not self.was_low
            and self.gap.relative_error > _ROUNDING
        )

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, int, int]:
        """Sorts the most severe first, and a fault before what it causes."""
        phase = (FORWARD, WEIGHTS, BACKWARD).index(self.phase)
        return (
            self.verdict == OK,
            self.latent,
            self.verdict in (UNDERFLOW, INACCURATE),
            self.given,
            phase,
            -self.order if self.phase == BACKWARD else self.order,
        )


def of_output(gap: compare.Gap, limits: _formats.Format) -> str:
    """Names what the gap of a layer's output, or of any value, is.

    Args:
        gap: The gap between 16-bit and float32 results.
        limits: The 16-bit format.

    Returns:
        The verdict.
    """
    return _of_gap(gap, FORWARD_TOLERANCES[limits.name])


def of_gradient(gap: compare.Gap, limits: _formats.Format) -> str:
    """Names what the gap of a gradient is, of which only the way matters.

    Args:
        gap: The gap between 16-bit and float32 results.
        limits: The 16-bit format.

    Returns:
        The verdict.
    """
    tolerance = BACKWARD_TOLERANCES[limits.name]
    if _is_low(gap):
        tolerance = _LOW_TOLERANCE
    verdict = _of_gap(gap, tolerance)
    if verdict == INACCURATE and gap.cosine > _SAME_DIRECTION[limits.name]:
        return OK
    return verdict


def _of_gap(gap: compare.Gap, tolerance: float) -> str:
    if gap.broken:
        return NOT_FINITE
    if gap.lost:
        inside = gap.headroom_bits >= 0
        return NOT_FINITE if gap.only_nan and inside else OVERFLOW
    if gap.relative_error <= tolerance:
        return OK
    return UNDERFLOW if _is_low(gap) else INACCURATE


def _is_low(gap: compare.Gap) -> bool:
    return gap.flushed + gap.subnormal > _MOST


def forward(
    layer: str, order: int, found: one_layer.Verdicts, limits: _formats.Format
) -> Finding:
    """Judges the outputs of one call."""
    given = of_output(found.arguments, limits) != OK
    verdict = of_output(found.outputs, limits)
    return Finding(layer, FORWARD, verdict, found.outputs, order, given)


def backward(
    layer: str,
    order: int,
    found: one_layer.Verdicts,
    limits: _formats.Format,
    reaches_weights: bool,
) -> Finding | None:
    """Judges the gradients of one call.

    Args:
        layer: The layer's name.
        order: Its rank in the order of computation.
        found: The gaps.
        limits: The 16-bit format.
        reaches_weights: Whether a weight lies before the layer, so that the
            gradient of its input is of use.

    Returns:
        The finding; None where there is no gradient.
    """
    if found.incoming is None or found.weights is None or found.inputs is None:
        return None
    incoming = of_gradient(found.incoming, limits)
    was_low = _is_low(found.incoming)
    if incoming != OK:
        return Finding(
            layer, BACKWARD, incoming, found.incoming, order, True, was_low=True
        )
    gaps = [found.weights, *([found.inputs] if reaches_weights else [])]
    worst = max(gaps, key=_badness)
    given = of_output(found.arguments, limits) != OK
    verdict = of_gradient(worst, limits)
    return Finding(
        layer, BACKWARD, verdict, worst, order, given, was_low=was_low
    )


def _badness(gap: compare.Gap) -> tuple[float, float]:
    error = math.inf if gap.broken else gap.relative_error
    return error, -gap.headroom_bits
