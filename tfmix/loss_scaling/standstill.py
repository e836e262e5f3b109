"""Warns, or raises an error, if a run skips step after step.

In `fit` the line after the epoch warns. Your own loop has no epochs: its eager
steps warn, and for compiled ones there is `check_health`.
"""

from collections.abc import Mapping
from typing import Any

import keras

from tfmix import _messages
from tfmix.loss_scaling import errors

# A scale that falls from its first value to its best one skips fewer steps.
AFTER = 8
# The error names at most this many variables.
_MOST_NAMED = 5


def warn_of_eighth(
    name: str, in_a_row: int, overflow_counts: Mapping[str, int]
) -> None:
    """Warns that an eager loop stands still, at the eighth skip in a row.

    A compiled step cannot warn without a call to its host: it could not be
    saved, exported or cached.

    Args:
        name: String, the optimizer's name.
        in_a_row: Integer, the skipped steps since the last applied one.
        overflow_counts: See `LossScaleOptimizer`.
    """
    if in_a_row == AFTER:
        message = "%s of %r: the gradients were not finite.\n%s"
        _messages.warn(message, idle(AFTER), name, _what_to_do(overflow_counts))


def idle(skips: int) -> str:
    """Returns how every message says that a run stands still."""
    return f"no update was applied in the last {skips} steps"


def check(optimizer: Any, limit: int) -> None:
    """Raises if an optimizer's training is stuck.

    Args:
        optimizer: An object with counts of skipped steps, a rule and a scale.
        limit: The number of skipped steps in a row that is too many.

    Raises:
        LossScaleError: If training is stuck. It names the variables whose
            gradients were not finite and says what to change.
    """
    if (skips := optimizer.consecutive_skips) >= limit:
        raise errors.LossScaleError(
            f"{idle(skips).capitalize()}: the gradients were not finite.\n"
            f"{_what_to_do(optimizer.overflow_counts)}"
        )


def _what_to_do(counts: Mapping[str, int]) -> str:
    """Names the variables that were not finite, and what to change."""
    # A fault spreads from the output towards the input. The counts are in the
    # order of the model and a sort is stable: of two variables with equal
    # counts the one nearer the output comes first.
    named = [(path, count) for path, count in counts.items() if count]
    named = sorted(reversed(named), key=lambda item: -item[1])
    lines = [
        f"  {path}: not finite in {count} skipped step(s)"
        for path, count in named[:_MOST_NAMED]
    ]
    if len(named) > _MOST_NAMED:
        lines.append(f"  and {len(named) - _MOST_NAMED} more")
    on_jax = keras.backend.backend() == "jax"
    advice = _ADVICE.format(scope=_SCOPE if on_jax else "")
    return "\n".join(["Most often, nearest the output first:", *lines, advice])


# Other steps find the place of gradients themselves.
_SCOPE = """
  - in a step of your own under jax.jit, compute gradients inside
    keras.StatelessScope(zip(optimizer.variables, state)): those that grow
    inside the model then begin lower after an overflow;"""
_ADVICE = """What to change, most likely first:
  - if the loss is not finite: rows with NaN, infinity or, in float16, numbers
    beyond 65504 in the data; drop or fix them;
  - if it is infinite, as with targets of 1e38: standardise the targets,
    y = (y - y.mean()) / y.std();
  - keep the layer named first in float32: Layer(..., dtype="float32"), and
    end the model in tfmix.float32_output(...);{scope}
  - lower the learning rate or clip: Adam(..., global_clipnorm=1.0);
  - train in "mixed_bfloat16", which has the range of float32;
  - allow a smaller scale: DynamicLossScale(min_scale=2.0**-14).
tfmix.check(model, x, y) names the layer and the line to change."""
