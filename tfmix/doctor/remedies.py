"""The line of code that mends a finding."""

from tfmix import _formats
from tfmix.doctor import verdicts

_NAMES = {
    verdicts.FORWARD: "its output",
    verdicts.BACKWARD: "its gradient",
    verdicts.WEIGHTS: "a weight",
}


def line(
    finding: verdicts.Finding,
    layer_class: str,
    limits: _formats.Format,
    unscaled: bool,
) -> str:
    """Returns a line of Python with a comment that says why, or nothing.

    An `unscaled` model trains without a loss scale, which mends underflow.
    """
    if finding.verdict == verdicts.OK:
        return finding.note and f"# {finding.note}"
    backward = finding.phase == verdicts.BACKWARD
    if unscaled and backward and finding.verdict == verdicts.UNDERFLOW:
        code = "tfmix.LossScaleOptimizer(optimizer)"
    elif finding.gap.broken:
        code = 'keras.config.set_dtype_policy("float32")'
    elif finding.layer == verdicts.LOSS:
        code = _loss_code(finding)
    elif finding.kind == verdicts.PROBABILITIES:
        code = 'tfmix.float32_output("softmax")'
    else:
        code = f'{layer_class}(..., name="{finding.layer}", dtype="float32")'
    return f"{code}  # {finding.note or _why(finding, limits)}"


def _loss_code(finding: verdicts.Finding) -> str:
    if finding.phase == verdicts.FORWARD:
        return 'loss(y, keras.ops.cast(outputs, "float32"))'
    if finding.verdict == verdicts.OVERFLOW:
        return "keras.ops.mean(errors)"
    return "1024.0 * loss"


def _why(finding: verdicts.Finding, limits: _formats.Format) -> str:
    gap, name, what = finding.gap, limits.name, _NAMES[finding.phase]
    if gap.broken:
        return f"{what} is not finite in float32 either: mend that first"
    if gap.headroom_bits < 0 and gap.lost:
        reached = limits.max * 2.0**-gap.headroom_bits / 2
        return f"{what} reaches {reached:.3g}; {name} ends at {limits.max:g}"
    if gap.lost:
        return f"{name} overflows inside it; {what} is fine in float32"
    if finding.verdict == verdicts.UNDERFLOW:
        share = gap.flushed + gap.subnormal
        return f"{share:.0%} of {what} lies below {name}'s {limits.tiny:.2g}"
    return f"{what} is off by {gap.relative_error:.2g} in {name}"
