"""Turns measured gaps into verdicts, ranks them, and advises on fixes."""

import dataclasses
import math

from tfmix import _bad_rows, _formats
from tfmix.tools.diagnostics import ranges, runs

OK = "ok"
OVERFLOW = "overflow"
UNDERFLOW = "underflow"
INACCURATE = "inaccurate"
NOT_FINITE = "not_finite"

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"

# The row about the loss has this name.
LOSS = "loss"

# These limit the norm of the error over the norm of the result. One rounding
# costs 0.0003 in float16, and 0.002 in bfloat16. Healthy layers stayed below
# 0.001 and 0.006.
FORWARD_TOLERANCES = {"float16": 0.01, "bfloat16": 0.08}
# Gradients of weights are long sums, which a CPU computes in 16 bit. Layers
# that train well had errors of 0.3 and 0.6.
BACKWARD_TOLERANCES = {"float16": 0.25, "bfloat16": 0.5}
# A step needs only the direction of a gradient, which such sums keep: at an
# error of 0.3, the cosine was 0.96.
_SAME_DIRECTION = {"float16": 0.95, "bfloat16": 0.8}

# A tensor that lies mostly below the normal range counts as underflow.
_MOST = 0.5
# Below the normal range, each further layer of the backward pass loses digits,
# so the tolerance is smaller.
_LOW_TOLERANCE = 0.05

_LAST = 'keras.layers.Dense(..., dtype="float32")  # the last layer'
_MEAN = "keras.ops.mean(errors)"
_SCALER = "tfmix.LossScaleOptimizer(optimizer)"
CHECK = "`tfmix.check(model, x, y)` says what to write"
_NAMES = {FORWARD: "its output", BACKWARD: "its gradient"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The judgement on one layer, or the loss, in one phase."""

    layer: str
    phase: str
    verdict: str
    gap: ranges.Gap
    order: int = 0  # the position of the layer in the order of computation
    # The layer's input does not fit into 16 bits, so that another layer may be
    # the cause.
    bad_input: bool = False
    note: str = ""  # an observation, in words
    is_own: bool = True  # true if the loss is the user's own function

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, int]:
        """Sorts the most severe first, and a fault before what it causes."""
        return (
            self.verdict == OK,
            self.verdict in (UNDERFLOW, INACCURATE),
            self.bad_input,
            self.phase == BACKWARD,
            -self.order if self.phase == BACKWARD else self.order,
        )


def of_output(gap: ranges.Gap, limits: _formats.Format) -> str:
    """Returns the verdict on the gap of a layer's output, or of any value."""
    return _of_gap(gap, FORWARD_TOLERANCES[limits.name])


def of_gradient(gap: ranges.Gap, limits: _formats.Format) -> str:
    """Returns the verdict on a gradient's gap, mostly by its direction."""
    tolerance = BACKWARD_TOLERANCES[limits.name]
    if _is_low(gap):
        tolerance = _LOW_TOLERANCE
    verdict = _of_gap(gap, tolerance)
    if verdict == INACCURATE and gap.cosine > _SAME_DIRECTION[limits.name]:
        return OK
    return verdict


def bound(finding: Finding, limits: _formats.Format) -> float:
    """Returns the largest error with which a finding is fine."""
    if finding.phase != BACKWARD:
        return FORWARD_TOLERANCES[limits.name]
    is_low = _is_low(finding.gap)
    return _LOW_TOLERANCE if is_low else BACKWARD_TOLERANCES[limits.name]


def _of_gap(gap: ranges.Gap, tolerance: float) -> str:
    if gap.broken:
        return NOT_FINITE
    if gap.lost:
        only_nan = gap.only_nan and gap.headroom_bits >= 0
        return NOT_FINITE if only_nan else OVERFLOW
    if gap.relative_error <= tolerance:
        return OK
    return UNDERFLOW if _is_low(gap) else INACCURATE


def _is_low(gap: ranges.Gap) -> bool:
    return gap.flushed + gap.subnormal > _MOST


def backward(
    layer: str,
    order: int,
    gaps: runs.CallGaps,
    limits: _formats.Format,
    reaches_weights: bool,
) -> Finding | None:
    """Judges the gradients of one call; None if there are none.

    The gradient of its inputs only counts if weights come before the layer.
    """
    if not gaps.gradients:
        return None
    incoming, inputs, weights = gaps.gradients
    worst, bad_input = incoming, True
    if of_gradient(worst, limits) == OK:
        own = [weights, inputs] if reaches_weights else [weights]
        worst = max(own, key=_badness)
        bad_input = of_output(gaps.arguments, limits) != OK
    verdict = of_gradient(worst, limits)
    return Finding(layer, BACKWARD, verdict, worst, order, bad_input)


def _badness(gap: ranges.Gap) -> tuple[float, float]:
    error = math.inf if gap.broken else gap.relative_error
    return error, -gap.headroom_bits


def advice(
    finding: Finding,
    layer_class: str,
    limits: _formats.Format,
    unscaled: bool,
) -> str:
    """Returns a line of Python, with the reason as its comment, or nothing.

    An `unscaled` model trains without a loss scale, which would fix underflow.
    """
    if finding.verdict == OK:
        return finding.note and f"# {finding.note}"
    backward = finding.phase == BACKWARD
    if unscaled and backward and finding.verdict == UNDERFLOW:
        code = _SCALER
    elif finding.gap.broken:
        return f"# {_why(finding, limits)}"
    elif finding.layer == LOSS:
        code = _loss_code(finding)
    else:
        code = f'{layer_class}(..., name="{finding.layer}", dtype="float32")'
    return f"{code}  # {finding.note or _why(finding, limits)}"


def _loss_code(finding: Finding) -> str:
    is_own = finding.is_own
    if finding.phase == FORWARD:
        cast = 'loss(y, keras.ops.cast(outputs, "float32"))'
        return cast if is_own else _LAST
    if finding.verdict == OVERFLOW:
        return _MEAN if is_own else "y = (y - y.mean()) / y.std()"
    return "1024.0 * loss" if is_own else _SCALER


def _why(finding: Finding, limits: _formats.Format) -> str:
    gap, name, what = finding.gap, limits.name, _NAMES[finding.phase]
    if gap.broken:
        return f"{what} is not finite in float32 either: fix that first"
    if gap.headroom_bits < 0 and gap.lost:
        return _bad_rows.beyond(what, gap.largest, name, limits.max)
    if gap.lost:
        return f"{name} overflows inside it; {what} is fine in float32"
    if finding.verdict == UNDERFLOW:
        share = gap.flushed + gap.subnormal
        return f"{share:.0%} of {what} lies below {name}'s {limits.tiny:.2g}"
    return f"{what} is off by {gap.relative_error:.2g} in {name}"


@dataclasses.dataclass(frozen=True)
class LayerVerdict:
    """A row of a report: one layer in one phase.

    Attributes:
        layer: The layer's name, or its path if the name is not unique;
            `"loss"`; `"x"` or `"y"` for data that is not finite.
        phase: `"forward"`: the layer's outputs; `"backward"`: the gradients
            of its inputs and weights; `"weights"`: weights that are not
            finite.
        verdict: `"ok"`, `"overflow"`, `"underflow"`, `"inaccurate"` or
            `"not_finite"`.
        relative_error: The norm of the error that this layer adds in 16 bit,
            over the norm of the float32 result.
        headroom_bits: How often the result can be doubled before it leaves
            the format; negative if it is outside.
        advice: The line of code that fixes the fault, or a note.
        broken: Whether there is a fault in float32 as well.
        dtype: The dtype that the layer computes in; `""` for data.
        bound: The largest relative error that is fine.
    """

    layer: str
    phase: str
    verdict: str
    relative_error: float
    headroom_bits: float
    advice: str
    broken: bool = False
    dtype: str = ""
    bound: float = math.inf

    @property
    def code(self) -> str:
        """The line of code to write, "" for none."""
        return f" {self.advice}".partition(" # ")[0].strip()

    @property
    def reason(self) -> str:
        """The fault, and why it is one."""
        why = f" {self.advice}".partition(" # ")[2]
        return f"{self.layer}, {self.phase}, {self.verdict}: {why}"

    @property
    def sentence(self) -> str:
        """The reason and the code in one line."""
        return self.reason + (f"; write {self.code}" if self.code else "")
