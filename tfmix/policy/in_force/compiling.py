"""`compile` gives a 16-bit model the optimizer it needs, and guards it.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfmix.policy.in_force import suited_optimizer
from tfmix.scaling import guard
from tfmix.scaling import optimizer as scaling

_AUTO = "auto_scale_loss"


def wrapped(original: Callable[..., None]) -> Callable[..., None]:
    """Returns what stands in for `Trainer.compile` while a policy is on.

    Args:
        original: Keras's own method.

    Returns:
        A method that calls it with the optimizer the model needs.
    """

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        _compile(self, functools.partial(original, self), args, kwargs)

    return compile


def method(model: Any, level: str | None) -> Callable[..., None]:
    """Returns a `compile` for one model, whatever policy is on by then.

    Args:
        model: The model; its class may have a `compile` of its own.
        level: The level it was made at, `None` for none.

    Returns:
        What to set as the instance's `compile`.
    """
    class_level = type(model).compile

    @functools.wraps(class_level)
    def compile(*args: Any, **kwargs: Any) -> None:
        # Looked up again: hooks may have come or gone since.
        original = functools.partial(type(model).compile, model)
        _compile(model, original, args, kwargs, level)

    return compile


def adopt_optimizer(model: Any, optimizer: Any) -> None:
    """Makes an optimizer the compiled model's, also in what it saves.

    Keras saves the optimizer `compile` was given, not the one it made of it,
    and drops its state when it is loaded under another policy.

    Args:
        model: A compiled model.
        optimizer: The optimizer in use from now on.
    """
    model.optimizer = optimizer
    saved = getattr(model, "_compile_config", None)
    if saved is not None:
        saved.config["optimizer"] = optimizer


def _compile(
    model: Any,
    original: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    level: str | None = None,
) -> None:
    try:
        bound = inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        # Not our error to raise: the user's own says it better.
        original(*args, **kwargs)
        return
    wanted = _read(bound, _AUTO, True)
    given = _read(bound, "optimizer", None)
    if wanted and given is not None:
        _write(bound, "optimizer", _suited(given, model, level))
    if _takes(bound, _AUTO):
        # Keras would decide from the model's own policy, not its layers'.
        bound.arguments[_AUTO] = False
    original(*bound.args, **bound.kwargs)
    optimizer = getattr(model, "optimizer", None)
    if wanted and optimizer is not None:
        optimizer = _made_by_keras(optimizer, given)
        optimizer = suited_optimizer.suited(optimizer, model, level)
        if optimizer is not model.optimizer:
            adopt_optimizer(model, optimizer)
    elif not wanted and hasattr(model, "_compile_config"):
        # Keras forgets this one, and would scale after loading.
        model._compile_config.config[_AUTO] = False
    if isinstance(optimizer, scaling.LossScaleOptimizer):
        guard.guard(model)


def _suited(given: Any, model: Any, level: str | None) -> Any:
    return suited_optimizer.suited(keras.optimizers.get(given), model, level)


def _made_by_keras(optimizer: Any, given: Any) -> Any:
    """Takes off a `LossScaleOptimizer` that Keras put on by itself."""
    plain = type(optimizer) is keras.optimizers.LossScaleOptimizer
    if plain and optimizer is not given:
        return optimizer.inner_optimizer
    return optimizer


def _takes(bound: inspect.BoundArguments, name: str) -> bool:
    return name in bound.signature.parameters


def _extra(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Returns what went into `**kwargs` of an overridden `compile`."""
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            extra: dict[str, Any] = bound.arguments.setdefault(name, {})
            return extra
    return {}


def _read(bound: inspect.BoundArguments, name: str, default: Any) -> Any:
    if _takes(bound, name):
        declared = bound.signature.parameters[name].default
        if declared is not inspect.Parameter.empty:
            default = declared
        return bound.arguments.get(name, default)
    return _extra(bound).get(name, default)


def _write(bound: inspect.BoundArguments, name: str, value: Any) -> None:
    if _takes(bound, name):
        bound.arguments[name] = value
    else:
        _extra(bound)[name] = value
