"""A model made under a policy carries it: rules, losses, its `compile`.

Everything is an attribute of the one model, so it lasts when the scope the
model was made in has ended, and no class of Keras keeps a trace.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from tfmix.policy import policy as policies
from tfmix.policy.in_force import compiling, losses

_MARK = "_tfmix_carried"


def carry(model: Any, policy: keras.DTypePolicy) -> None:
    """Lets a model keep its op rules, float32 losses and safe `compile`.

    Args:
        model: A Keras model, built or not.
        policy: The policy it is made under; nothing is done for one without
            16-bit parts.
    """
    if not policies.is_sixteen_bit(policy):
        return
    drop(model)
    ruled = policies.with_rules(policy)
    detach = losses.attach(model, ruled.float32_ops)
    compile = compiling.method(model, ruled.level)
    object.__setattr__(model, "compile", compile)
    object.__setattr__(model, _MARK, _Carried(policy, compile, detach))


def carried_policy(model: Any) -> keras.DTypePolicy | None:
    """Returns the policy a model carries, `None` if it carries none."""
    carried = vars(model).get(_MARK)
    return carried.policy if carried else None


def drop(model: Any) -> None:
    """Takes back what `carry` did."""
    carried = vars(model).pop(_MARK, None)
    if carried is None:
        return
    carried.detach()
    if vars(model).get("compile") is carried.compile:
        object.__delattr__(model, "compile")


@dataclasses.dataclass(frozen=True)
class _Carried:
    policy: keras.DTypePolicy
    compile: Callable[..., None]
    detach: Callable[[], None]
