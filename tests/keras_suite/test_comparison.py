"""The comparison of Keras's tests under two policies finds what was lost."""

import re

import pytest

from tests.keras_suite import comparison, known

PASSED = comparison.Result("passed", "")
FAILED = comparison.Result("failed", "AssertionError: 1 is not 2")
SKIPPED = comparison.Result("skipped", "")
TEST = "layers/a_test.py::ATest::test_a"


@pytest.mark.parametrize(
    "tfmix",
    [{TEST: FAILED}, {TEST: SKIPPED}, {}],
    ids=["fails", "is skipped", "is gone"],
)
def test_a_test_that_only_keras_passes_is_new(tfmix):
    found = comparison.compare({TEST: PASSED}, tfmix, {})
    assert list(found.new) == [TEST]
    assert f"NEW {TEST}" in comparison.table("layers", found)


@pytest.mark.parametrize(
    ("message", "is_new"),
    [("AssertionError: 1 is not 3", False), ("TypeError: 1 is not 2", True)],
    ids=["other digits", "another error"],
)
def test_another_error_than_under_keras_policy_is_new(message, is_new):
    tfmix = {TEST: comparison.Result("failed", message)}
    found = comparison.compare({TEST: FAILED}, tfmix, {})
    assert list(found.new) == ([TEST] if is_new else [])


@pytest.mark.parametrize("both", [FAILED, SKIPPED])
def test_what_both_do_is_not(both):
    found = comparison.compare({TEST: both}, {TEST: both}, {})
    assert not found.new
    assert found.failed == (both is FAILED)


def test_what_passes_does_not_run_under_keras_policy():
    tfmix = {TEST: PASSED, "b": FAILED, "c": SKIPPED}
    assert comparison.not_passed(tfmix) == ["b", "c"]


def test_a_test_with_a_reason_is_known():
    found = comparison.compare({TEST: PASSED}, {TEST: FAILED}, {"*_a": "why"})
    assert not found.new
    assert found.known == {TEST: "why"}
    assert not found.stale


@pytest.mark.parametrize(
    ("tfmix", "is_stale"),
    [({TEST: PASSED}, True), ({TEST: FAILED}, False), ({}, False)],
    ids=["passes", "fails under both", "does not run"],
)
def test_a_reason_is_stale_if_its_test_passes(tfmix, is_stale):
    found = comparison.compare(tfmix, tfmix, {"*_a": "why"})
    assert found.stale == (["*_a"] if is_stale else [])


def test_a_failure_in_the_teardown_overrules_a_pass():
    lines = [
        {"test": TEST, "outcome": "passed", "message": ""},
        {"test": TEST, "outcome": "failed", "message": FAILED.message},
    ]
    assert comparison.results(lines) == {TEST: FAILED}
    assert comparison.results(lines[::-1]) == {TEST: FAILED}


def test_every_reason_is_a_sentence():
    assert known.REASONS
    for name, reason in known.REASONS.items():
        assert re.match(r"[A-Z].*\.$", reason), name
