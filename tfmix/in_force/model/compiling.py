"""`compile` gives a 16-bit model the optimizer it needs, and guards it."""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import compile_config, model_methods, optimizers
from tfmix.in_force.model import bound_arguments, suited_optimizer
from tfmix.scaling import guard
from tfmix.scaling import optimizer as scaling

_AUTO = "auto_scale_loss"


def compile_suitably(
    model: keras.Model,
    original: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    level: str | None = None,
) -> None:
    """Compiles a model with the optimizer that its dtypes call for."""
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        # Not our error to raise: the user's own says it better.
        original(*args, **kwargs)
        return
    wanted = bound_arguments.get(bound, _AUTO, True)
    given = bound_arguments.get(bound, "optimizer")
    _refuse_two_scales(given)
    if _AUTO in bound.signature.parameters:
        # Keras would decide from the model's own policy, not its layers'.
        bound.arguments[_AUTO] = False
    original(*bound.args, **bound.kwargs)
    # Also where a `compile` of the model's own has made it.
    optimizer = getattr(model, "optimizer", None)
    if wanted and optimizer is not None:
        plain = type(optimizer) is keras.optimizers.LossScaleOptimizer
        if plain and optimizer is not given:
            # Keras has put it on by itself.
            optimizer = optimizer.inner_optimizer
        optimizer = suited_optimizer.suited(optimizer, model, level)
        if optimizer is not model.optimizer:
            compile_config.adopt_optimizer(model, optimizer)
    elif not wanted:
        compile_config.save_argument(model, _AUTO, False)
    if isinstance(optimizer, scaling.LossScaleOptimizer):
        guard.put_on(model)
    elif (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        and model_methods.part(model, model_methods.RULES) is not None
    ):
        _messages.warn_once(
            "Keras's own LossScaleOptimizer stays: a step that it skips leaves "
            "NaN in metrics and statistics, and is not counted. Compile with "
            "tfmix.LossScaleOptimizer(optimizer.inner_optimizer) instead."
        )


def _refuse_two_scales(given: Any) -> None:
    if not isinstance(given, keras.optimizers.Optimizer):
        return
    scalers = [
        optimizer
        for optimizer in optimizers.chain(given)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    ]
    if len(scalers) > 1:
        raise ValueError(
            "`optimizer` holds two loss scales, one inside the other: the "
            "gradients are divided by both, the loss is multiplied by the "
            f"outer one alone. Received: optimizer={given!r} around "
            f"{scalers[1]!r}. Take off the outer one: "
            "`compile(optimizer.inner_optimizer, ...)`."
        )
