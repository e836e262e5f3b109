"""Takes the step of an optimizer, wrapped or not, as a whole or not at all."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tfmix._keras import context_values
from tfmix._keras import variables as keras_variables
from tfmix.step import finite, gradients, replicas


def take(
    optimizer: Any,
    grads: Sequence,
    variables: Sequence,
    update: Callable[[list, list], Any],
    *,
    assigned: Sequence,
    counters: Sequence,
    count: Callable[[Any, Any, list, list], None],
    unscale: Callable[[Sequence, Sequence], list] = gradients.in_float32,
    checks_unscaled: bool = False,
    reduce_dtype: str | None = None,
    reduce_factor: Any = None,
) -> Any:
    """Sums gradients over replicas, checks them, and updates or skips.

    Args:
        optimizer: The optimizer whose step it is.
        grads: One gradient for each of the variables; `None` where there is
            none.
        variables: The variables. One may occur twice: two networks that share
            a trunk may each give a gradient for its variables.
        update: Applies unscaled float32 gradients to a replica's variables.
        assigned: All variables that `update` may assign to.
        counters: The variables that `count` may assign to besides.
        count: Gets whether the step was applied, a flag for each variable of
            the optimizer whose gradient was not finite, the unscaled gradients,
            and the summed ones.
        unscale: Turns summed gradients into unscaled float32 ones.
        checks_unscaled: Whether unscaled gradients may be infinite where the
            summed ones are not.
        reduce_dtype: The dtype of the sum over replicas; `None` for that of
            each gradient.
        reduce_factor: What multiplies them before the sum and divides them
            after it.

    Returns:
        Whether the step was applied: a bool, or a boolean scalar tensor.
    """
    summed = replicas.sum_gradients(
        list(grads), list(variables), reduce_dtype, reduce_factor
    )
    with (
        replicas.one_replica([*assigned, *counters], optimizer),
        # Gradients are float32 from here on: the rules of a model's step would
        # only cost time.
        context_values.holding(rules=context_values.NO_RULES),
    ):
        unscaled = unscale(summed, variables)
        local = [*map(keras_variables.local, variables)]
        checked = gradients.narrow_if_dense(summed, unscaled)
        applied, bad = finite.apply_if_finite(
            unscaled if checks_unscaled else checked,
            functools.partial(update, unscaled, local),
            assigned,
        )
        bad = finite.by_variable(bad, optimizer, variables)
        count(applied, bad, unscaled, summed)
    return applied
