"""Decides whether a step is applied or skipped, as a whole.

TensorFlow's graphs use a conditional, which saves the work of a skipped step.
Under XLA and JAX each value is selected, under JAX as soon as it is assigned.
An update kernel can select, too, whereas a conditional would make a GPU wait
for the host.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix._keras import compilation, context_values, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.step import all_finite

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
else:
    import jax


def apply_if_finite(
    grads: Sequence, update: Callable[[], Any], variables: Sequence
) -> tuple[Any, Any]:
    """Runs an update if all gradients are finite; else nothing changes.

    Args:
        grads: Gradients, dense or sparse; `None` where there is none.
        update: Assigns to the variables. Under XLA and JAX it always runs.
        variables: All variables that it may assign to.

    Returns:
        Whether it was applied: a bool where that is known already, else a
        boolean scalar tensor. Also a boolean vector: which gradients are not
        finite.
    """
    bad = _not_finite(list(grads))
    applied = _known(ops.logical_not(ops.any(bad)))
    update = functools.partial(_as_chosen, update)
    if isinstance(applied, bool):
        if applied:
            update()
    elif keras.backend.backend() == "jax":
        with keras_variables.only_if(applied, variables):
            update()
    elif compilation.by_xla():
        before = [compilation.read(variable) for variable in variables]
        update()
        restore_unless(applied, zip(variables, before, strict=True))
    else:
        tf.cond(applied, _then(update), _then(None))
    return applied, bad


def restore_unless(applied: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Restores the values of variables, unless a step was applied.

    Args:
        applied: Bool or boolean scalar tensor.
        pairs: Variables, each with its value before the step.
    """
    these = written(pairs)
    applied = _known(applied)

    def restore() -> None:
        for variable, old in these:
            variable.assign(old)

    if isinstance(applied, bool):
        if not applied:
            restore()
    elif compilation.by_xla():
        for variable, old in these:
            new = compilation.read(variable)
            variable.assign(compilation.selected(applied, new, old))
    elif these:
        tf.cond(applied, _then(None), _then(restore))


def either(condition: Any, function: Callable[[], Any]) -> Any:
    """Returns a condition, or a function's result where it is false.

    Args:
        condition: Bool or boolean scalar tensor.
        function: Returns a bool or boolean scalar tensor, and changes nothing.
    """
    condition = _known(condition)
    if isinstance(condition, bool):
        return condition or _known(function())
    if compilation.by_xla():
        return ops.logical_or(condition, function())
    return tf.cond(condition, _then(None), function)


def written(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns the variables that may have a new value by now.

    The others are left alone, because XLA would copy each.
    """
    return [pair for pair in pairs if _may_be_written(*pair)]


def by_variable(bad: Any, optimizer: Any, variables: Sequence) -> Any:
    """Joins the flags of all gradients of each variable.

    Args:
        bad: Boolean vector, a flag for each gradient.
        optimizer: The optimizer that gets the gradients.
        variables: The variable of each gradient.

    Returns:
        Boolean vector, a flag for each variable the optimizer was built with.
    """
    every = np.arange(len(optimizers.remembered(optimizer)))
    rows = optimizers.positions(optimizer, variables)
    if np.array_equal(rows, every):
        return bad
    is_row = np.equal.outer(every, rows)
    return ops.any(ops.logical_and(is_row, bad), axis=1)


def is_chosen() -> bool:
    """Returns whether an `apply_if_finite` runs the caller.

    Then the caller does not check again.
    """
    return context_values.block.get().is_chosen


def _as_chosen(update: Callable[[], Any]) -> None:
    # An optimizer computes in the dtypes of its variables: the rules of a
    # model's step only cost time here.
    with context_values.holding(is_chosen=True, rules=context_values.NO_RULES):
        update()


def _then(function: Callable[[], Any] | None) -> Callable[[], Any]:
    """Returns a branch of a conditional, which has to return a tensor."""

    def branch() -> Any:
        if function is not None:
            function()
        return tf.constant(True)

    return branch


def _known(condition: Any) -> Any:
    """Returns a bool if the code runs op by op."""
    if isinstance(condition, bool):
        return condition
    return condition if compilation.is_symbolic(condition) else bool(condition)


def _may_be_written(variable: Any, old: Any) -> bool:
    value = compilation.backend_variable(variable)
    if hasattr(value, "handle"):
        return compilation.may_be_written(value)
    # The value is JAX's, or belongs to a scope that holds variables' values.
    return value is not old


def _flags(grads: list) -> Any:
    # If XLA could look through the flags, it might order a step so that it
    # needs more memory.
    return compilation.kept_apart(all_finite.not_finite(grads))


# It is compiled even for eager steps, where every operation costs time.
_not_finite = (
    jax.jit(_flags)
    if keras.backend.backend() == "jax"
    else all_finite.not_finite
)
