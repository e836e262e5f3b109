"""Is training stuck, and which variables' gradients are not finite?"""

from collections.abc import Mapping
from typing import Any

from tfmix import _errors
from tfmix.scaling import rules

MAX_CONSECUTIVE_SKIPS = 50
_MOST_NAMED = 5


def check(optimizer: Any, max_consecutive_skips: int) -> None:
    """Raises if steps are skipped and will be, see `check_health`."""
    skips, rule = optimizer.consecutive_skips, optimizer.rule
    if not skips:
        return
    has_floor = isinstance(rule, rules.DynamicLossScale)
    if has_floor and optimizer.loss_scale <= rule.min_scale:
        where = f"The loss scale has reached its floor, {rule.min_scale:g}"
    elif skips >= max_consecutive_skips:
        where = f"The loss scale is {optimizer.loss_scale:g}"
    else:
        return
    raise _errors.LossScaleError(
        f"{where}, and the last {skips} step(s) were skipped: their "
        "gradients were not finite. No update is being applied.\n"
        f"{_named(optimizer.overflow_counts)}\n{_ADVICE}"
    )


def _named(counts: Mapping[str, int]) -> str:
    # A fault spreads from the output towards the input. The counts are in the
    # order of the model and a sort is stable: of two variables with equal
    # counts the one nearer the output comes first.
    named = [(path, count) for path, count in counts.items() if count]
    named = sorted(reversed(named), key=lambda item: -item[1])
    if not named:
        return "No gradient was seen that was not finite by itself."
    lines = [
        f"  {path}: not finite in {count} skipped step(s)"
        for path, count in named[:_MOST_NAMED]
    ]
    if len(named) > _MOST_NAMED:
        lines.append(f"  and {len(named) - _MOST_NAMED} more")
    return "\n".join(["Most often, nearest the output first:", *lines])


_ADVICE = """What to change, most likely first:
  - keep the layer named first in float32: Layer(..., dtype="float32"), and
    end the model in tfmix.float32_output(...);
  - look for NaN or infinity in the data: a skip at any scale means that the
    loss or the forward pass itself is not finite;
  - lower the learning rate or clip: Adam(..., global_clipnorm=1.0);
  - train in "mixed_bfloat16", which has the range of float32;
  - if the loss itself is huge, allow a smaller scale:
    DynamicLossScale(min_scale=2.0**-14).
tfmix.check(model, x, y) names the layer and the line to change."""
