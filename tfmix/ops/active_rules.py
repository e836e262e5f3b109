"""Which rules hold for the running code: those of its block, or the installed.

A policy's rules are the names of the ops that compute in float32, and one more
that every 16-bit policy has.
"""

from tfmix._keras import context_values


class _Installed:
    # These hold outside of blocks.
    rules: frozenset[str] = frozenset()


installed = _Installed()


def of_caller() -> frozenset[str]:
    """Returns the caller's active rules."""
    own = context_values.block.get().rules
    return installed.rules if own is None else own
