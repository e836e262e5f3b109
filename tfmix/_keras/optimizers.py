"""What a wrapper has to know about the inner optimizer's private side.

Checked on Keras 3.12.4 and 3.15.1: `_use_weight_decay`,
`Optimizer._var_key`, `Variable._path`, `Variable._layout`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfmix import _formats


def is_sixteen_bit(variable: Any) -> bool:
    """Whether a wrapper keeps float32 state for this variable.

    Args:
        variable: A `keras.Variable`.

    Returns:
        True for float16 and bfloat16 variables that a gradient updates.
        Variables overwritten with their gradient (fp8 scales) have no update
        to lose.

    Example:
        >>> is_sixteen_bit(keras.Variable([1.0], dtype="bfloat16"))
        True
    """
    if getattr(variable, "overwrite_with_gradient", False):
        return False
    return keras.backend.standardize_dtype(variable.dtype) in (
        _formats.SIXTEEN_BIT
    )


def adopt(target: Any, variable: Any) -> Any:
    """Gives a stand-in variable the identity of the model's variable.

    Maps by path (`MultiOptimizer`, Muon's `exclude_layers`), weight-decay
    patterns and the names of the slots then match as they do in float32.

    Args:
        target: The `keras.Variable` the inner optimizer updates.
        variable: The model's `keras.Variable`.

    Returns:
        `target`.
    """
    target._path = variable.path
    target.trainable = variable.trainable
    target.constraint = variable.constraint
    target.regularizer = variable.regularizer
    return target


def carry_weight_decay_exclusions(
    optimizer: Any, variables: Sequence, targets: Sequence
) -> None:
    """Excludes the targets of excluded variables from weight decay.

    `exclude_from_weight_decay(var_list=...)` remembers variables by identity,
    so what was said about a model's variable must be said about its stand-in.

    Args:
        optimizer: The unbuilt inner optimizer.
        variables: The model's variables.
        targets: The variable the inner optimizer updates for each of them.
    """
    for each in getattr(optimizer, "optimizers", [optimizer]):
        excluded = [
            target
            for variable, target in zip(variables, targets, strict=True)
            if not uses_weight_decay(each, variable)
        ]
        if excluded:
            each.exclude_from_weight_decay(var_list=excluded)


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Whether the optimizer's weight decay acts on a model's variable.

    Args:
        optimizer: The unbuilt inner optimizer.
        variable: The model's `keras.Variable`.

    Returns:
        False only if `exclude_from_weight_decay` named the variable.
    """
    decide = getattr(optimizer, "_use_weight_decay", None)
    return True if decide is None else bool(decide(variable))


def key(variable: Any) -> Any:
    """Returns the key under which optimizers find what belongs to a variable.

    Args:
        variable: A `keras.Variable`, or one replica's copy in its place.

    Returns:
        A hashable.
    """
    # It reads nothing of the optimizer.
    return keras.optimizers.Optimizer._var_key(None, variable)


def with_nested(optimizer: Any) -> Iterator[Any]:
    """Yields a Keras optimizer and all that it wraps.

    Args:
        optimizer: Anything; what is no optimizer yields nothing.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return
    yield optimizer
    for value in list(vars(optimizer).values()):
        for each in value if isinstance(value, list | tuple) else [value]:
            yield from with_nested(each)
