"""Models with 16-bit layers that came about where no policy saw them made.

Copies, loaded models and new heads carry from `compile` on the policy of their
layers, as if they had been made under it.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _formats, _messages
from tfmix._keras import layers
from tfmix.in_force.layer import fallback, uncast_inputs
from tfmix.in_force.model import carried, compiling, computing_layers
from tfmix.in_force.process_wide import bare_optimizers
from tfmix.policy import policy as policies


def adopting(original: Callable[..., None]) -> Callable[..., None]:
    """Returns what stands in for `Trainer.compile`."""

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        optimizer = kwargs.get("optimizer", args[0] if args else None)
        if not getattr(optimizer, "guarded_alone", False):
            _adopt(self)
        inner = functools.partial(original, self)
        compiling.compile_suitably(self, inner, args, kwargs)
        is_told = _is_told_late(self)
        if is_told or (self.built and not _has_sixteen_bit(self)):
            bare_optimizers.leave_alone(self.optimizer)

    return compile


def _adopt(model: keras.Model) -> None:
    """Lets a model carry the policy of its 16-bit layers, if none yet."""
    policy = _policy_of_layers(model)
    if policy is None or carried.carried_policy(model) is not None:
        return
    for layer in layers.flat_layers(model):
        if fallback.can_have(layer) and fallback.STATE not in vars(layer):
            uncast_inputs.keep_exact(layer)
            fallback.put_on(layer)
    carried.carry(model, policy)


def _policy_of_layers(model: keras.Model) -> keras.DTypePolicy | None:
    for layer in layers.flat_layers(model)[1:]:
        if isinstance(layer, keras.Model) and carried.carried_policy(layer):
            return carried.carried_policy(layer)
    for dtype in _formats.SIXTEEN_BIT:
        if computing_layers.computes_in(model, dtype):
            pure = computing_layers.has_sixteen_bit_variables(model)
            return policies.Policy(dtype if pure else f"mixed_{dtype}")
    return None


def _has_sixteen_bit(model: keras.Model) -> bool:
    computes_in = functools.partial(computing_layers.computes_in, model)
    return any(map(computes_in, _formats.SIXTEEN_BIT))


def _is_told_late(model: keras.Model) -> bool:
    """Warns of a model that was made before the active policy was set."""
    policy = keras.config.dtype_policy()
    is_late = bool(
        policies.is_sixteen_bit(policy)
        and layers.own_layers(model)
        and carried.carried_policy(model) is None
        and not _has_sixteen_bit(model)
    )
    if is_late:
        _messages.warn(
            "%r is active, but no layer of the model computes in 16 "
            "bit: the model was made before. Make it after setting the "
            "policy, or write tfmix.apply_policy(model, %r).",
            policy.name,
            policy.name,
        )
    return is_late
