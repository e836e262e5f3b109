"""What is said of a run whose steps are all skipped."""

from collections.abc import Mapping

_MOST_NAMED = 5


def message(where: str, skips: int, counts: Mapping[str, int]) -> str:
    """Returns what happened, to which variables, and what to change.

    Args:
        where: String, a sentence's beginning: where the loss scale is.
        skips: Integer, steps skipped in a row.
        counts: Skipped steps in which each variable's gradient was not finite,
            by the variable's path, in the order of the model.
    """
    return (
        f"{where}, and the last {skips} step(s) were skipped: their "
        "gradients were not finite. No update is being applied.\n"
        f"{_named(counts)}\n{_ADVICE}"
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
