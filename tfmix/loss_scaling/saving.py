"""Writes and reads a loss-scale optimizer's state and config."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfmix import _messages
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import rules
from tfmix.step import replicas

# A saved state names own variables, and numbers the inner optimizer's.
_OWN, _INNER = "own_", "inner_"
# Keras's class stores its variables by position: these four, then the inner
# optimizer's.
_KERAS_OWN = ("iteration", "learning_rate", "step_counter", "dynamic_scale")
# This own variable holds a number for each of the model's variables.
_COUNTS = _OWN + "overflow_counts"


def write(
    store: Any, own: Sequence[keras.Variable], inner: Sequence[keras.Variable]
) -> None:
    """Writes the optimizer's own variables, and the inner optimizer's."""
    for variable in own:
        store[_OWN + variable.name] = np.asarray(variable.numpy())
    for position, variable in enumerate(inner):
        store[f"{_INNER}{position}"] = np.asarray(variable.numpy())


def read(
    store: Any,
    name: str,
    own: Sequence[keras.Variable],
    inner: Sequence[keras.Variable],
    trained: int | None,
) -> None:
    """Reads the state that `write`, an older version or Keras's class wrote.

    It warns if there is no state, or that of other variables, like Keras,
    because weights can be loaded into any model.

    Args:
        store: Maps positions, as strings, to arrays, as Keras opens a file.
        name: String, the optimizer's name.
        own: Its own variables.
        inner: The inner optimizer's variables, if it is built.
        trained: The number of variables it was built with; `None` if it was
            not.

    Raises:
        ValueError: If the state does not fit. Nothing changes then.
    """
    keys = list(store.keys())
    saved = len(store[_COUNTS]) if _COUNTS in keys else 0
    if trained is None:
        # Neither was built, so there is no optimizer state on either side.
        fits = bool(keys) and all(key.startswith(_OWN) for key in keys)
        reason = (
            "it is not built yet; to restore its state as well, call "
            "`optimizer.build(model.trainable_variables)` before loading"
        )
    elif saved not in (0, trained):
        fits = False
        reason = (
            f"it was saved for {saved} trainable variables, and {trained} are "
            "trainable now; to go on with it, change what is trainable after "
            "loading"
        )
    else:
        fits = bool(keys) and not _is_unbuilt(store)
        reason = "the file holds no optimizer state"
    if fits:
        _load(store, own, inner)
    else:
        _messages.warn(
            "the state of optimizer %r was not restored: %s.", name, reason
        )


def config(optimizer: Any) -> dict:
    """Returns the constructor's arguments, in Keras's form if possible."""
    serialize = keras.saving.serialize_keras_object
    inner = serialize(optimizer.inner_optimizer)
    arguments = {"name": optimizer.name, "inner_optimizer": inner}
    keras_form = {
        "initial_scale": optimizer.initial_scale,
        "dynamic_growth_steps": optimizer.dynamic_growth_steps,
    }
    # The rule may differ from the default in other settings.
    if type(optimizer.rule) is rules.DynamicLossScale and optimizer.rule == (
        rules.of_arguments("dynamic", *keras_form.values())
    ):
        arguments |= keras_form
    else:
        arguments["loss_scale"] = serialize(optimizer.rule)
    if optimizer.reduce_dtype is not None:
        arguments["reduce_dtype"] = optimizer.reduce_dtype
    return arguments


def made_from(kind: type, config: Mapping, custom_objects: Any) -> Any:
    """Returns the optimizer that `config` described.

    Args:
        kind: The class.
        config: A config of this or of an older version.
        custom_objects: Dict of classes by name, as in Keras, or `None`.
    """
    arguments = dict(config)
    for key in ("inner_optimizer", "loss_scale"):
        if isinstance(arguments.get(key), dict):
            arguments[key] = keras.saving.deserialize_keras_object(
                arguments[key], custom_objects=custom_objects
            )
    replicas.drop_unsupported(arguments)
    # Older files store this setting of the model.
    arguments.pop("guarded", None)
    optimizer = kind(**arguments)
    return optimizer


def _is_unbuilt(store: Mapping) -> bool:
    """Returns whether Keras's class was saved before its build."""
    keys = sorted(map(str, store.keys()))
    return keys == list("0123") and not any(np.ndim(store[k]) for k in keys)


def _load(store: Mapping, own: Sequence, inner: Sequence) -> None:
    """Reads a state that this class, an older one or Keras's has written."""
    # A variable that an older version did not have keeps its initial value. So
    # does an inner optimizer that was saved before it was built.
    arrays = {str(key): np.asarray(store[key]) for key in store.keys()}
    if all(re.fullmatch(r"\d+", key) for key in arrays):
        keys = [_OWN + name for name in _KERAS_OWN]
        if len(arrays) != len(keys) + len(inner):
            # The file holds only an inner optimizer, so a run without loss
            # scaling can continue with it. It is refused below if the count
            # differs.
            keys = []
        keys += [f"{_INNER}{n}" for n in range(len(arrays) - len(keys))]
        arrays = {key: arrays[str(n)] for n, key in enumerate(keys)}
    targets = {_OWN + variable.name: variable for variable in own}
    is_new = all(v.numpy() == 0 for v in inner if v.name == "iteration")
    if any(key.startswith(_INNER) for key in arrays) or not is_new:
        targets |= {
            f"{_INNER}{n}": variable for n, variable in enumerate(inner)
        }
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
    keras_variables.assign_all(
        [targets[key] for key in arrays], [*arrays.values()]
    )
