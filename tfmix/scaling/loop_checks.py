"""What a training loop of one's own gets wrong, caught before any update."""

import warnings
from collections.abc import Sequence
from typing import Any


def variables_to_update(
    optimizer: Any, grads: Sequence[Any], trainable_variables: Any
) -> list[Any]:
    """Returns the variables that the gradients belong to.

    Builds the optimizer on them if it is not built yet.

    Raises:
        ValueError: If there is no gradient, the counts differ, a variable is
            unknown, or it cannot be told which variables are meant.
    """
    if trainable_variables is not None:
        variables = list(trainable_variables)
        if not optimizer.built:
            optimizer.build(variables)
        optimizer._check_variables_are_known(variables)
    elif optimizer.built:
        variables = optimizer.model_variables
    else:
        raise ValueError(
            "The optimizer is not built yet, so it must be told which "
            "variables the gradients belong to. Write "
            "optimizer.apply(grads, model.trainable_variables)."
        )
    if len(grads) != len(variables):
        raise ValueError(
            "There must be one gradient (or None) for each variable. "
            f"Received: {len(grads)} gradients for {len(variables)} variables."
        )
    if all(gradient is None for gradient in grads):
        raise ValueError(
            "No gradients provided for any variable: all are None. Is the "
            "loss computed from the model's variables, inside the gradient "
            "tape?"
        )
    return variables


def warn_unless_loss_was_scaled(optimizer: Any) -> None:
    """Warns once if gradients arrive and `scale_loss` was never called."""
    if optimizer.loss_was_scaled:
        return
    optimizer.loss_was_scaled = True
    warnings.warn(
        "The gradients are divided by the loss scale, but the loss was never "
        "multiplied by it, so every update is too small by that factor. "
        "Write `loss = optimizer.scale_loss(loss)` inside the gradient tape "
        "(or inside the function given to jax.grad).",
        stacklevel=4,
    )


def warn_unless_guarded(optimizer: Any) -> None:
    """Warns once if a model that was guarded when saved is so no longer."""
    if not optimizer.guarded or optimizer.in_guarded_step:
        return
    optimizer.guarded = False
    warnings.warn(
        "The model was guarded when it was saved: a skipped step left no "
        "trace in its statistics and metrics. A guard is not part of the "
        "file. Write `tfmix.guard(model)` after loading it.",
        stacklevel=4,
    )
