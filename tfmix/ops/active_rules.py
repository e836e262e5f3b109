"""Which rules hold for the running code: those of its block, or the installed.

A policy's rules are the names of the ops that compute in float32, and one more
that every 16-bit policy has.
"""

import keras

from tfmix._keras import context_values
from tfmix.policy import policy as policies

# Every 16-bit policy has this rule, in addition to its ops.
SIXTEEN_BIT = "(16 bit)"


class _Installed:
    # These hold outside of blocks.
    rules: frozenset[str] = frozenset()


installed = _Installed()


def of_policy(policy: keras.DTypePolicy | None) -> frozenset[str]:
    """Returns the rules of a policy; there are none without 16 bit."""
    if policy is None or not policies.is_sixteen_bit(policy):
        return frozenset()
    return frozenset({*policies.with_rules(policy).float32_ops, SIXTEEN_BIT})


def of_caller() -> frozenset[str]:
    """Returns the caller's active rules."""
    own = context_values.block.get().rules
    return installed.rules if own is None else own
