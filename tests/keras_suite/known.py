"""Keras's tests that rightly fail under a policy of tfmix, with the reason."""

from typing import NamedTuple


class Known(NamedTuple):
    """Tests that may fail under a policy of tfmix alone.

    Attributes:
        tests: A pattern of `fnmatch` for their names below `keras/src`.
        reason: Why tfmix is right.
        backends: The backends under which they fail.
        policies: The policies under which they fail.
    """

    tests: str
    reason: str
    backends: tuple[str, ...] = ("tensorflow", "jax")
    policies: tuple[str, ...] = ("mixed_float16", "mixed_bfloat16")


KNOWN = [
    Known(
        "*::test_dtype_standardization",
        "A model returns float32.",
    ),
]


def reasons(backend, policy):
    """Returns the reasons that hold for a run, by the pattern."""
    return {
        one.tests: one.reason
        for one in KNOWN
        if backend in one.backends and policy in one.policies
    }
