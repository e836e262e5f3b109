"""`compile` gives a 16-bit model the optimizer it needs, and guards it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _formats, _messages
from tfmix._keras import (
    compile_config,
    layers,
    model_methods,
    optimizers,
)
from tfmix.in_force.model import (
    bound_arguments,
    computing_layers,
    suited_optimizer,
)
from tfmix.in_force.process_wide import bare_optimizers
from tfmix.policy import policy as policies
from tfmix.scaling import guard
from tfmix.scaling import optimizer as scaling

_AUTO = "auto_scale_loss"


def wrapped(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a `Trainer.compile` that puts on what a model needs."""

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        compile_suitably(self, functools.partial(original, self), args, kwargs)
        is_told = _warn_of_late_policy(self)
        if is_told or _is_known_without_16_bit(self):
            bare_optimizers.leave_alone(self.optimizer)

    return compile


def _is_known_without_16_bit(model: keras.Model) -> bool:
    computes_in = functools.partial(computing_layers.computes_in, model)
    return model.built and not any(map(computes_in, _formats.SIXTEEN_BIT))


def _warn_of_late_policy(model: keras.Model) -> bool:
    """Warns of a model that was made before the policy in force was set."""
    policy = keras.config.dtype_policy()
    computes_in = functools.partial(computing_layers.computes_in, model)
    is_late = bool(
        policies.is_sixteen_bit(policy)
        and layers.own_layers(model)
        and model_methods.part(model, model_methods.RULES) is None
        and not any(map(computes_in, _formats.SIXTEEN_BIT))
    )
    if is_late:
        _messages.warn(
            "%r is in force, but no layer of the model computes in 16 "
            "bit: the model was made before. Make it after setting the "
            "policy, or write tfmix.apply_policy(model, %r).",
            policy.name,
            policy.name,
        )
    return is_late


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
    given = _optimizer(bound_arguments.get(bound, "optimizer"))
    _refuse_two_scales(given)
    is_kerass = type(given) is keras.optimizers.LossScaleOptimizer
    if is_kerass and model_methods.part(model, model_methods.RULES):
        _messages.warn_once(
            "Keras's own LossScaleOptimizer stays: a step that it skips leaves "
            "NaN in metrics and statistics, and is not counted. Compile with "
            "tfmix.LossScaleOptimizer(optimizer.inner_optimizer) instead."
        )
    if wanted and given is not None:
        given = suited_optimizer.suited(given, model, level)
        bound_arguments.put(bound, "optimizer", given)
    if _AUTO in bound.signature.parameters:
        # Keras would decide from the model's own policy, not its layers'.
        bound.arguments[_AUTO] = False
    original(*bound.args, **bound.kwargs)
    optimizer = getattr(model, "optimizer", None)
    if wanted and optimizer is not None:
        # A `compile` of the model's own may have made another one.
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


def _refuse_two_scales(given: keras.optimizers.Optimizer | None) -> None:
    scalers = [
        each
        for each in optimizers.chain(given)
        if isinstance(each, keras.optimizers.LossScaleOptimizer)
    ]
    if len(scalers) > 1:
        raise ValueError(
            "`optimizer` holds two loss scales, one inside the other: the "
            "gradients are divided by both, the loss is multiplied by the "
            f"outer one alone. Received: optimizer={given!r} around "
            f"{scalers[1]!r}. Take off the outer one: "
            "`compile(optimizer.inner_optimizer, ...)`."
        )


def _optimizer(given: Any) -> keras.optimizers.Optimizer | None:
    """Returns the optimizer that an argument means to Keras.

    One that only the model's own `compile` understands, such as KerasHub's
    "auto", is its to make.
    """
    try:
        return None if given is None else keras.optimizers.get(given)
    except (TypeError, ValueError):
        return None
