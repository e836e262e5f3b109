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
        "callbacks/terminate_on_nan_test.py::TerminateOnNaNTest::"
        "test_raise_error_terminate_stops_on_later_batch",
        "A batch whose target is infinite is skipped, and its loss is left out "
        "of the epoch's: training goes on, as the README says.",
    ),
    Known(
        "models/functional_test.py::FunctionalTest::test_dtype_standardization",
        "A model returns float32, also if its output layer computes in 16 bit.",
    ),
]


def reasons(backend, policy):
    """Returns the reasons that hold for a run, by the pattern."""
    return {
        one.tests: one.reason
        for one in KNOWN
        if backend in one.backends and policy in one.policies
    }
