"""Recognises optimizers that update an element from that element only."""

from collections.abc import Sequence
from typing import Any

import keras

# They are recognised by their `update_step`, so subclasses that inherit it
# count, too. `ScheduleFreeAdamW` is in Keras 3.13 and newer.
NAMES = tuple(
    "SGD Adam AdamW Adamax Adagrad Adadelta RMSprop Nadam Ftrl Lion "
    "ScheduleFreeAdamW".split()
)


def is_elementwise(optimizer: Any) -> bool:
    """Returns whether each element of a variable is updated from its own."""
    declared = getattr(type(optimizer), "elementwise", False)
    return declared or runs_update_of(optimizer, NAMES)


def runs_update_of(optimizer: Any, names: Sequence[str]) -> bool:
    """Returns whether an optimizer has the `update_step` of one of Keras's."""
    kinds = [vars(keras.optimizers).get(name) for name in names]
    return type(optimizer).update_step in [c.update_step for c in kinds if c]
