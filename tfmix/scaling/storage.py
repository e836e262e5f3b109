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
    store: MutableMapping[str, Any], own: Sequence[Any], inner: Sequence[Any]
) -> None:
    """Writes own variables by name, the inner optimizer's by position."""
    for variable in own:
        store[_OWN + variable.name] = _to_numpy(variable)
    for position, variable in enumerate(inner):
        store[f"{_INNER}{position}"] = _to_numpy(variable)


def load(
    store: Mapping[str, Any], own: Sequence[Any], inner: Sequence[Any]
) -> None:
    """Reads what `save`, an older tfmix or Keras's own class has written.

    A variable that an older version did not have keeps its initial value, and
    so does an inner optimizer that was saved before it was built.
    Nothing is assigned unless everything fits.
    """
    arrays = {str(key): np.asarray(store[key]) for key in store.keys()}
    if all(re.fullmatch(r"\d+", key) for key in arrays):
        arrays = _from_positions(arrays, len(inner))
    targets = {_OWN + variable.name: variable for variable in own}
    if any(key.startswith(_INNER) for key in arrays) or not _is_new(inner):
        targets |= {f"{_INNER}{n}": each for n, each in enumerate(inner)}
    missing = {key for key in targets if key.startswith(_INNER)} - set(arrays)
    surplus = set(arrays) - set(targets)
    if missing or surplus:
        raise ValueError(_mismatch(inner, sorted(missing), sorted(surplus)))
    variables.assign_all(
        [targets[key] for key in arrays], [arrays[key] for key in arrays]
    )


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


def _from_positions(
    arrays: Mapping[str, np.ndarray], num_inner: int
) -> dict[str, np.ndarray]:
    by_position = [arrays[str(n)] for n in range(len(arrays))]
    named: dict[str, np.ndarray] = {}
    if len(by_position) == len(_KERAS_OWN) + num_inner:
        own = by_position[: len(_KERAS_OWN)]
        named = {_OWN + n: a for n, a in zip(_KERAS_OWN, own, strict=True)}
        by_position = by_position[len(_KERAS_OWN) :]
    # What remains is the inner optimizer's: a run without loss scaling can
    # go on with it. `load` refuses it if the count differs.
    inner = {f"{_INNER}{n}": array for n, array in enumerate(by_position)}
    return named | inner


def _mismatch(
    inner: Sequence[Any], missing: list[str], surplus: list[str]
) -> str:
    return (
        "The saved optimizer state does not fit this optimizer, whose inner "
        f"optimizer has {len(inner)} variables. Received: a state without "
        f"{missing} and with {surplus} besides. Load it into the optimizer "
        "it was saved from, built on the same variables "
        "(`optimizer.build(model.trainable_variables)`)."
    )


def _is_new(inner: Sequence[Any]) -> bool:
    return all(_to_numpy(v) == 0 for v in inner if v.name == "iteration")


def _to_numpy(variable: Any) -> np.ndarray:
    return np.asarray(variable.numpy())
