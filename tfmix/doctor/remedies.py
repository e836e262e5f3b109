"""The line of code that mends a finding."""

from tfmix import _formats
from tfmix.doctor import verdicts

_NAMES = {
    verdicts.FORWARD: "its output",
    verdicts.BACKWARD: "its gradient",
    verdicts.WEIGHTS: "a weight",
}


def line(
    finding: verdicts.Finding, layer_class: str, limits: _formats.Format
) -> str:
    """Returns what to write, and why, for one finding.

    Args:
        finding: The finding.
        layer_class: Name of the layer's class.
        limits: The 16-bit format.

    Returns:
        One line of Python with a comment; an empty string for a layer that
        is fine.
    """
    if finding.verdict == verdicts.OK:
        return finding.note and f"# {finding.note}"
    return f"{_code(finding, layer_class)}  # {_why(finding, limits)}"


def mended_by_scaling(finding: verdicts.Finding) -> bool:
    """Says whether a loss scale would bring a finding's gradients back."""
    return (
        finding.phase == verdicts.BACKWARD
        and finding.verdict == verdicts.UNDERFLOW
    )


def scaled(line: str) -> str:
    """Returns the advice for a gradient that no loss scale lifts yet."""
    why = line.partition("  # ")[2]
    return f"tfmix.LossScaleOptimizer(optimizer)  # {why}"


def _code(finding: verdicts.Finding, layer_class: str) -> str:
    if finding.layer == verdicts.LOSS:
        return _loss_code(finding)
    if finding.gap.broken:
        return 'keras.config.set_dtype_policy("float32")'
    if "probabilities" in finding.note:
        return 'tfmix.float32_output("softmax")'
    return f'{layer_class}(..., name="{finding.layer}", dtype="float32")'


def _loss_code(finding: verdicts.Finding) -> str:
    if finding.gap.broken:
        return 'keras.config.set_dtype_policy("float32")'
    if finding.phase == verdicts.FORWARD:
        return 'loss(y, keras.ops.cast(outputs, "float32"))'
    if finding.verdict == verdicts.OVERFLOW:
        return "keras.ops.mean(errors)"
    return "1024.0 * loss"


def _why(finding: verdicts.Finding, limits: _formats.Format) -> str:
    if finding.note:
        return finding.note
    gap, name = finding.gap, limits.name
    what = (
        "its gradient" if finding.phase == verdicts.BACKWARD else "its output"
    )
    if finding.phase == verdicts.WEIGHTS:
        what = "a weight"
    if gap.broken:
        return f"{what} is not finite in float32 either: mend that first"
    if gap.headroom_bits < 0 and gap.lost:
        reached = limits.max * 2.0**-gap.headroom_bits
        return (
            f"{what} reaches {reached / 2:.3g}; {name} ends at {limits.max:g}"
        )
    if gap.lost:
        return f"{name} overflows inside it; {what} is fine in float32"
    if finding.verdict == verdicts.UNDERFLOW:
        share = gap.flushed + gap.subnormal
        return f"{share:.0%} of {what} lies below {name}'s {limits.tiny:.2g}"
    return f"{what} is off by {gap.relative_error:.2g} in {name}"
