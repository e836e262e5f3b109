"""What is said of a run whose steps are all skipped."""

from collections.abc import Mapping
from typing import Any

from tfmix.loss_scaling import errors, rules

_MOST_NAMED = 5


def check(optimizer: Any, limit: int) -> None:
    """Raises if an optimizer's training is stuck.

    Args:
        optimizer: What counts skipped steps, with a rule and a loss scale.
        limit: Steps skipped in a row that are too many at any scale.

    Raises:
        LossScaleError: If it is. It names the variables whose gradients were
            not finite and says what to change.
    """
    skips, rule = optimizer.consecutive_skips, optimizer.rule
    is_dynamic = isinstance(rule, rules.DynamicLossScale)
    floor = rule.lowest_scale if is_dynamic else 0.0
    # One at the floor is a bad batch; another in a row no scale can save.
    if skips > 1 and optimizer.loss_scale <= floor:
        where = f"The loss scale has reached its floor, {floor:g}"
    elif skips >= limit:
        where = f"The loss scale is {optimizer.loss_scale:g}"
    else:
        return
    raise errors.LossScaleError(
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
  - if the loss is not finite: rows with NaN, infinity or, in float16, numbers
    beyond 65504 in the data; drop or fix them;
  - if it is finite and large, as of targets of 5e4: standardise the targets,
    y = (y - y.mean()) / y.std();
  - keep the layer named first in float32: Layer(..., dtype="float32"), and
    end the model in tfmix.float32_output(...);
  - lower the learning rate or clip: Adam(..., global_clipnorm=1.0);
  - train in "mixed_bfloat16", which has the range of float32;
  - allow a smaller scale: DynamicLossScale(min_scale=2.0**-14).
tfmix.check(model, x, y) names the layer and the line to change."""
