"""The comparison of Keras's tests under two policies finds what was lost."""

import pytest

from tests.keras_suite import comparison

PASSED = comparison.Result("passed", "")
FAILED = comparison.Result("failed", "AssertionError: 1 is not 2")
SKIPPED = comparison.Result("skipped", "")
TEST = "layers/a_test.py::ATest::test_a"


OTHER = comparison.Result("failed", "AssertionError: 1 is not 3")
WORSE = comparison.Result("failed", "TypeError: 1 is not 2")


@pytest.mark.every_case("each is a verdict of its own, and fast")
@pytest.mark.parametrize(
    ("keras", "tfmix", "is_new"),
    [
        (PASSED, {TEST: FAILED}, True),
        (PASSED, {TEST: SKIPPED}, True),
        (PASSED, {}, True),
        (FAILED, {TEST: WORSE}, True),
        (FAILED, {TEST: OTHER}, False),
        (FAILED, {TEST: FAILED}, False),
        (SKIPPED, {TEST: SKIPPED}, False),
    ],
    ids=[
        *("a failure", "a skip", "a test that is gone", "another error"),
        *("other digits", "the same failure", "the same skip"),
    ],
)
def test_a_test_that_does_worse_than_under_keras_policy_is_new(
    keras, tfmix, is_new
):
    found = comparison.compare({TEST: keras}, tfmix, {})
    assert list(found.new) == [TEST] * is_new
    assert (f"NEW {TEST}" in comparison.table("layers", found)) is is_new
    both = bool(tfmix) and keras.outcome == tfmix[TEST].outcome == "failed"
    assert found.failed == both


def test_what_passes_does_not_run_under_keras_policy():
    tfmix = {TEST: PASSED, "b": FAILED, "c": SKIPPED}
    assert comparison.not_passed(tfmix) == ["b", "c"]


def test_a_test_with_a_reason_is_known():
    found = comparison.compare({TEST: PASSED}, {TEST: FAILED}, {"*_a": "why"})
    assert not found.new
    assert found.known == {TEST: "why"}
    assert not found.stale
