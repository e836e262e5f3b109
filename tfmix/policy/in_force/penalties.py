"""Regularizers and added losses in float32, beside a compiled loss.

Regularizers are widened at their door, `__call__`, and so is what a layer or
a model adds to its loss.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

from tfmix._keras import attributes, training_classes
from tfmix.policy.in_force import tensors

# In force under every 16-bit policy, next to the rules named like ops.
RULE = "(penalties)"


def makers(
    rules: Collection[str], holds: Callable[[str], bool]
) -> dict[attributes.Place, Callable[[Any], Any]]:
    """Returns what to replace for a set of rules, and by what."""
    if RULE not in rules:
        return {}
    widening = functools.partial(_widening, holds=holds)
    return {place: widening for place in training_classes.penalty_places()}


def _widening(
    original: Callable[..., Any], holds: Callable[[str], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def widened(self: Any, *args: Any, **kwargs: Any) -> Any:
        if holds(RULE):
            args, kwargs = tensors.map_leaves((args, kwargs), tensors.wide)
        return original(self, *args, **kwargs)

    return widened
