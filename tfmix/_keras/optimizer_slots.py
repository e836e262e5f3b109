"""What a Keras optimizer keeps for each variable, found by the variable.

Reaches into `keras.optimizers.Optimizer`: `_trainable_variables` and its
`_indices`, `_variables`, `_exclude_from_weight_decay` and its `_cache`, and
`MultiOptimizer._inner_optimizers`, `_var_to_optimizer_idx`. Checked on Keras
3.12.4 and 3.15.1.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

from tfmix._keras import optimizers

# Lists of the model's and of all variables, not of one slot of each.
_NO_SLOTS = ("_trainable_variables", "_variables")
_BY_KEY = ("_trainable_variables_indices", "_var_to_optimizer_idx")
_EXCLUDED = "_exclude_from_weight_decay"

# By attribute of the optimizer: one slot, or `None`, for each variable.
Slots = dict[str, list[keras.Variable | None]]
# By the `id` of a variable, the one that takes its place.
Moved = Mapping[int, keras.Variable]


def parts(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer and those inside it, outermost first."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return []
    inner = vars(optimizer).get("inner_optimizer")
    nested = vars(optimizer).get("_inner_optimizers", ())
    nested = nested if inner is None else (inner,)
    return [optimizer, *(part for each in nested for part in parts(each))]


def workers(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    """Returns those of an optimizer's parts that update variables."""
    return [x for x in parts(optimizer) if "inner_optimizer" not in vars(x)]


def slots(worker: keras.optimizers.Optimizer) -> Slots | None:
    """Returns the slots of a built optimizer in the order of its variables.

    Keras names a slot after its variable. `None` is returned unless each
    list of slots agrees with these names, and no slot is left over.
    """
    known = worker._trainable_variables
    found: Slots = {
        name: list(values)
        for name, values in vars(worker).items()
        if name not in _NO_SLOTS and _are_slots(values, len(known))
    }
    names = {scalar.name for scalar in numbers(worker).values()}
    for values in found.values():
        for slot, variable in zip(values, known, strict=True):
            if slot is not None and not _belongs(slot, variable):
                return None
            names.add(getattr(slot, "name", ""))
    if any(variable.name not in names for variable in worker._variables):
        return None
    return found


def numbers(
    worker: keras.optimizers.Optimizer,
) -> dict[str, keras.Variable]:
    """Returns an optimizer's counters, rates and the like by attribute."""
    return {
        name: value
        for name, value in vars(worker).items()
        if isinstance(value, keras.Variable) and not len(value.shape)
    }


def remembered(
    optimizer: Any, variables: Iterable[keras.Variable] = ()
) -> Callable[..., None]:
    """Notes which variables an optimizer and its parts know, by object.

    TensorFlow's know a variable by the `tf.Variable` inside, which a cast
    replaces.

    Args:
        optimizer: An optimizer or `None`.
        variables: The model's, for what is said of them before `build`.

    Returns:
        A function that lets the parts know the same variables again, or
        those that it is told of, which get the slots of the others.
    """
    noted = [_noted(part, list(variables)) for part in parts(optimizer)]

    def know_again(moved: Moved | None = None) -> None:
        for restore in noted:
            restore(moved or {})

    return know_again


def fresh(optimizer: Any, moved: Moved) -> Any:
    """Returns an optimizer of the same settings that is not built."""
    made = type(optimizer).from_config(optimizer.get_config())
    for old, new in zip(workers(optimizer), workers(made), strict=False):
        excluded = _excluded(old, old._trainable_variables)
        if excluded:
            excluded = [moved.get(id(each), each) for each in excluded]
            new.exclude_from_weight_decay(var_list=excluded)
    return made


def _are_slots(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and any(value is not None for value in values)
        and all(isinstance(v, keras.Variable | None) for v in values)
    )


def _belongs(slot: keras.Variable, variable: keras.Variable) -> bool:
    # Adafactor's rows and columns have no more than the variable's own name.
    path = variable.path.replace("/", "_")
    return slot.name == variable.name or slot.name.startswith(f"{path}_")


def _noted(
    part: Any, variables: list[keras.Variable]
) -> Callable[[Moved], None]:
    built, known = part.built, list(part._trainable_variables)
    tables = {
        name: [table.get(optimizers.key(each)) for each in known]
        for name in _BY_KEY
        if (table := vars(part).get(name)) is not None
    }
    excluded = _excluded(part, variables + known)

    def restore(moved: Moved) -> None:
        now = [moved.get(id(each), each) for each in known]
        if built:
            # Past the automatic tracking: these are the model's.
            vars(part)["_trainable_variables"] = now
            for name, values in tables.items():
                pairs = zip(map(optimizers.key, now), values, strict=True)
                vars(part)[name].clear()
                vars(part)[name].update(dict(pairs))
        if excluded:
            mapped = [moved.get(id(each), each) for each in excluded]
            vars(part)[_EXCLUDED] = set(map(optimizers.key, mapped))
            vars(part)[f"{_EXCLUDED}_cache"] = {}

    return restore


def _excluded(part: Any, variables: list) -> list[keras.Variable]:
    return [v for v in variables if not optimizers.uses_weight_decay(part, v)]
