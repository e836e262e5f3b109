"""The state of a LossScaleOptimizer in a file: all of it, or an error."""

import re
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from tfmix._keras import variables

_OWN, _INNER = "own_", "inner_"
# Keras's class stores its variables by position: these four, then the inner
# optimizer's.
_KERAS_OWN = ("iteration", "learning_rate", "step_counter", "dynamic_scale")


def save(
    store: MutableMapping[str, Any], own: Sequence, inner: Sequence
) -> None:
    """Writes own variables by name, the inner optimizer's by position."""
    for variable in own:
        store[_OWN + variable.name] = _to_numpy(variable)
    for position, variable in enumerate(inner):
        store[f"{_INNER}{position}"] = _to_numpy(variable)


def load(store: Mapping, own: Sequence, inner: Sequence) -> None:
    """Reads what `save`, an older tfmix or Keras's class wrote, or nothing."""
    # A variable that an older version did not have keeps its initial value, and
    # so does an inner optimizer that was saved before it was built.
    arrays = {str(key): np.asarray(store[key]) for key in store.keys()}
    if all(re.fullmatch(r"\d+", key) for key in arrays):
        keys = [_OWN + name for name in _KERAS_OWN]
        if len(arrays) != len(keys) + len(inner):
            # The inner optimizer's alone: a run without loss scaling can go
            # on with it. It is refused below if the count differs.
            keys = []
        keys += [f"{_INNER}{n}" for n in range(len(arrays) - len(keys))]
        arrays = {key: arrays[str(n)] for n, key in enumerate(keys)}
    targets = {_OWN + variable.name: variable for variable in own}
    is_new = all(_to_numpy(v) == 0 for v in inner if v.name == "iteration")
    if any(key.startswith(_INNER) for key in arrays) or not is_new:
        targets |= {f"{_INNER}{n}": each for n, each in enumerate(inner)}
    missing = {key for key in targets if key.startswith(_INNER)} - set(arrays)
    surplus = set(arrays) - set(targets)
    if missing or surplus:
        raise ValueError(
            "The saved optimizer state does not fit this optimizer, whose "
            f"inner optimizer has {len(inner)} variables. Received: a state "
            f"without {sorted(missing)} and with {sorted(surplus)} besides. "
            "Load it into the optimizer it was saved from, built on the same "
            "variables (`optimizer.build(model.trainable_variables)`)."
        )
    variables.assign_all([targets[key] for key in arrays], [*arrays.values()])


def warn_of_nothing_restored(optimizer: Any) -> None:
    """Warns that an optimizer goes on as it is, and why."""
    reason = "the file holds no optimizer state"
    if not optimizer.built:
        reason = (
            "it is not built yet; to restore its state as well, call "
            "`optimizer.build(model.trainable_variables)` before loading"
        )
    warnings.warn(
        f"The state of optimizer {optimizer.name!r} was not restored: "
        f"{reason}.",
        stacklevel=3,
    )


def _to_numpy(variable: Any) -> np.ndarray:
    return np.asarray(variable.numpy())
