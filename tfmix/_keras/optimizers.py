"""The parts of Keras's optimizers that tfmix reaches into.

Checked on Keras 3.12.4 and 3.15.1: `_variables`, `_trainable_variables`,
`_trainable_variables_indices`, `_check_variables_are_known`,
`_get_variable_index`, `_tracker`, `_use_weight_decay` and `_var_key`.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfmix._keras import attributes


def chain(
    optimizer: keras.optimizers.Optimizer | None,
) -> Iterator[keras.optimizers.Optimizer]:
    """Yields an optimizer and those inside it, outermost first."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def with_nested(optimizer: Any) -> Iterator[keras.optimizers.Optimizer]:
    """Yields an optimizer and all that it holds, in lists as well.

    What is no optimizer of Keras's yields nothing.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    yield optimizer
    for value in list(vars(optimizer).values()):
        for each in value if isinstance(value, list | tuple) else [value]:
            yield from with_nested(each)


def workers(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of a `MultiOptimizer`, or the one given."""
    return getattr(optimizer, "optimizers", [optimizer])


def key(variable: Any) -> Any:
    """Returns the key under which optimizers find what belongs to a variable.

    Args:
        variable: A `keras.Variable`, or one replica's copy in its place.
    """
    # It reads nothing of the optimizer.
    return keras.optimizers.Optimizer._var_key(None, variable)


def own_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """Returns a wrapper's variables without the inner optimizer's."""
    return list(optimizer._variables)


def remember(
    optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
) -> None:
    """Lets a wrapper know the model's variables, without tracking them."""
    own = optimizer.__dict__
    own["_trainable_variables"] = variables
    own["_trainable_variables_indices"] = {
        key(variable): index for index, variable in enumerate(variables)
    }


def remembered(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def recognised(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]
) -> list[keras.Variable]:
    """Returns the variables of the build that others stand for.

    Raises:
        ValueError: If an optimizer was not built with one of them.
    """
    optimizer._check_variables_are_known(variables)
    known = optimizer._trainable_variables
    return [known[optimizer._get_variable_index(v)] for v in variables]


def positions(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]
) -> list[int]:
    """Returns the places of variables among those of the build."""
    places = optimizer._trainable_variables_indices
    return [places[key(variable)] for variable in variables]


@contextlib.contextmanager
def alone(
    optimizer: keras.optimizers.Optimizer | None, strategy: Any = None
) -> Iterator[None]:
    """Lets an optimizer, and all in it, sum no gradients over replicas.

    Args:
        optimizer: The optimizer, if any.
        strategy: What it takes for its `tf.distribute.Strategy`; its own if
            `None`.
    """
    with contextlib.ExitStack() as undo:
        for each in with_nested(optimizer):
            # Without a strategy this saves an operation for each gradient.
            attributes.swap(undo, each, "_all_reduce_sum_gradients", list)
            if strategy is not None:
                attributes.swap(undo, each, "_distribution_strategy", strategy)
        yield


def strategy_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the `tf.distribute.Strategy` it was made under, or `None`."""
    return getattr(optimizer, "_distribution_strategy", None)


class OverwritesThroughInner:
    """Mixin: overwrites variables as the inner optimizer does."""

    inner_optimizer: keras.optimizers.Optimizer

    def _overwrite_variable_with_gradient(self, variable: Any) -> Any:
        return self.inner_optimizer._overwrite_variable_with_gradient(variable)


def count_as_tracked(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> None:
    """Keeps an optimizer from adding a variable to those that it saves."""
    optimizer._tracker.stored_ids["variables"].add(id(variable))


def uses_weight_decay(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Returns False if `exclude_from_weight_decay` named the variable."""
    decide = getattr(optimizer, "_use_weight_decay", None)
    return True if decide is None else bool(decide(variable))


def named(
    variables: Sequence[keras.Variable],
    var_list: Sequence[Any] | None,
    var_names: Sequence[str] | None,
) -> list[keras.Variable]:
    """Returns what the arguments of `exclude_from_weight_decay` mean."""
    keys = {key(variable) for variable in var_list or ()}
    pattern = "|".join(var_names) if var_names else None
    return [
        variable
        for variable in variables
        if key(variable) in keys
        or (pattern and re.search(pattern, variable.name))
    ]
