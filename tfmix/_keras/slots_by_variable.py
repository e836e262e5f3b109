"""Finds what a Keras optimizer keeps for each variable."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

from tfmix._keras import optimizers

# These list the model's and all variables, not a slot of each variable.
_NO_SLOTS = ("_trainable_variables", "_variables")
_BY_KEY = (
    "_trainable_variables_indices",
    "_var_to_optimizer_idx",
    # Keras 3.16 added this one.
    "_weight_decay_by_var_key",
)
_EXCLUDED = "_exclude_from_weight_decay"

# Maps an optimizer's attribute to a slot, or `None`, for each variable.
Slots = dict[str, list[keras.Variable | None]]
# Maps the `id` of a variable to the variable that replaces it.
Moved = Mapping[int, keras.Variable]


def slots(worker: optimizers.Optimizer) -> Slots | None:
    """Returns the slots of a built optimizer in the order of its variables."""
    # `None` unless the lists and the slots' names agree and cover everything.
    known = optimizers.remembered(worker)
    by_attribute: Slots = {
        name: list(values)
        for name, values in vars(worker).items()
        if name not in _NO_SLOTS
        and isinstance(values, list)
        and len(values) == len(known)
        and any(value is not None for value in values)
        and all(isinstance(v, keras.Variable | None) for v in values)
    }
    names = {scalar.name for scalar in numbers(worker).values()}
    for values in by_attribute.values():
        for slot, variable in zip(values, known, strict=True):
            if slot is not None and not _belongs(slot, variable):
                return None
            names.add(getattr(slot, "name", ""))
            names |= {part.name for part in getattr(slot, "beside", ())}
    all_named = all(kept.name in names for kept in worker._variables)
    return by_attribute if all_named else None


def numbers(worker: optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Returns an optimizer's counters, rates and the like by attribute."""
    return {
        name: value
        for name, value in vars(worker).items()
        if isinstance(value, keras.Variable) and not len(value.shape)
    }


def remembered(optimizer: Any, variables: Iterable = ()) -> Callable[..., None]:
    """Notes an optimizer's variables; returns a function that restores them.

    TensorFlow's optimizers know a variable by its inner `tf.Variable`, which a
    cast replaces. `variables` are the model's, for settings made before
    `build`. Variables in `moved` get the slots of those they replace.
    """
    parts = optimizers.with_nested(optimizer)
    noted = [_noted(part, list(variables)) for part in parts]

    def know_again(moved: Moved | None = None) -> None:
        for restore in noted:
            restore(moved or {})

    return know_again


def fresh(optimizer: Any, moved: Moved) -> Any:
    """Returns an optimizer with the same settings that is not built."""
    made = type(optimizer).from_config(optimizer.get_config())
    for old, new in zip(
        optimizers.unwrapped(optimizer),
        optimizers.unwrapped(made),
        strict=False,
    ):
        if excluded := optimizers.undecayed(old, optimizers.remembered(old)):
            new.exclude_from_weight_decay(var_list=_moved(excluded, moved))
    return made


def _belongs(slot: keras.Variable, variable: keras.Variable) -> bool:
    # Adafactor's rows and columns have only the variable's own name.
    path = variable.path.replace("/", "_")
    return slot.name == variable.name or slot.name.startswith(f"{path}_")


def _noted(part: Any, variables: list) -> Callable[[Moved], None]:
    built, known = part.built, optimizers.remembered(part)
    tables = {
        name: [table.get(optimizers.key(variable)) for variable in known]
        for name in _BY_KEY
        if (table := vars(part).get(name)) is not None
    }
    excluded = optimizers.undecayed(part, variables + known)

    def restore(moved: Moved) -> None:
        if built:
            now = _moved(known, moved)
            # The optimizer does not track the model's variables. The tables are
            # new, because TensorFlow saves no dict that was changed without its
            # knowledge.
            vars(part)["_trainable_variables"] = now
            for name, values in tables.items():
                keys = map(optimizers.key, now)
                vars(part)[name] = dict(zip(keys, values, strict=True))
        if excluded:
            keys = map(optimizers.key, _moved(excluded, moved))
            vars(part)[_EXCLUDED] = set(keys)
            vars(part)[f"{_EXCLUDED}_cache"] = {}

    return restore


def _moved(these: list[keras.Variable], moved: Moved) -> list[keras.Variable]:
    return [moved.get(id(variable), variable) for variable in these]
