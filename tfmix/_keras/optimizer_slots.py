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
    optimizer: Any, variables: Iterable[keras.Variable]
) -> Callable[[], None]:
    """Notes which variables an optimizer and its parts know, by object.

    TensorFlow's know a variable by the `tf.Variable` inside, which a cast
    replaces.

    Args:
        optimizer: An optimizer or `None`.
        variables: The model's, for what is said of them before `build`.

    Returns:
        A function that lets the parts know the same variables again.
    """
    noted = [_noted(part, list(variables)) for part in parts(optimizer)]

    def know_again() -> None:
        for restore in noted:
            restore()

    return know_again


def move(
    worker: keras.optimizers.Optimizer,
    targets: Mapping[int, keras.Variable],
) -> None:
    """Lets a built optimizer update other variables with the slots it has.

    Args:
        worker: The optimizer.
        targets: By the `id` of a variable that it updates now, the one to
            update from now on.
    """
    known = worker._trainable_variables
    moved = [targets.get(id(variable), variable) for variable in known]
    for name in _BY_KEY:
        table = vars(worker).get(name, {})
        values = [table.get(optimizers.key(variable)) for variable in known]
        _rewrite(table, moved, values)
    excluded = [
        new
        for old, new in zip(known, moved, strict=True)
        if not optimizers.uses_weight_decay(worker, old)
    ]
    _set_known(worker, moved)
    _exclude(worker, excluded)


def fresh(optimizer: Any, targets: Mapping[int, keras.Variable]) -> Any:
    """Returns an optimizer of the same settings that is not built.

    Args:
        optimizer: A built optimizer.
        targets: By the `id` of a variable that it updates, the one which the
            new optimizer will be built for.
    """
    made = type(optimizer).from_config(optimizer.get_config())
    for old, new in zip(workers(optimizer), workers(made), strict=False):
        excluded = [
            targets.get(id(variable), variable)
            for variable in old._trainable_variables
            if not optimizers.uses_weight_decay(old, variable)
        ]
        if excluded:
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


def _noted(part: Any, variables: list[keras.Variable]) -> Callable[[], None]:
    built, known = part.built, list(part._trainable_variables)
    tables = {
        name: [table.get(optimizers.key(variable)) for variable in known]
        for name in _BY_KEY
        if (table := vars(part).get(name)) is not None
    }
    keys = getattr(part, _EXCLUDED, ())
    excluded = [v for v in variables + known if optimizers.key(v) in keys]

    def restore() -> None:
        if built:
            for name, values in tables.items():
                _rewrite(vars(part)[name], known, values)
            _set_known(part, known)
        _exclude(part, excluded)

    return restore


def _rewrite(table: dict, variables: list, values: list) -> None:
    table.clear()
    for variable, value in zip(variables, values, strict=True):
        if value is not None:
            table[optimizers.key(variable)] = value


def _set_known(part: Any, known: list[keras.Variable]) -> None:
    # Past the automatic tracking: these are the model's.
    vars(part)["_trainable_variables"] = known


def _exclude(part: Any, excluded: list[keras.Variable]) -> None:
    if excluded:
        vars(part)[_EXCLUDED] = {optimizers.key(v) for v in excluded}
        vars(part)[f"{_EXCLUDED}_cache"] = {}
