"""The comparison of Keras's tests under two policies finds what was lost."""

import re

import pytest

from tests.keras_suite import comparison, known

PASSED = comparison.Result("passed", "")
FAILED = comparison.Result("failed", "1 is not 2")
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


@pytest.mark.parametrize("both", [PASSED, FAILED, SKIPPED])
def test_what_both_do_is_not(both):
    found = comparison.compare({TEST: both}, {TEST: both}, {})
    assert not found.new
    assert not found.fixed


def test_a_test_with_a_reason_is_known():
    found = comparison.compare({TEST: PASSED}, {TEST: FAILED}, {"*_a": "why"})
    assert not found.new
    assert found.known == {TEST: "why"}
    assert not found.stale


@pytest.mark.parametrize(
    ("keras", "is_stale"), [({TEST: PASSED}, True), ({}, False)]
)
def test_a_reason_without_a_failure_is_stale_where_its_test_ran(
    keras, is_stale
):
    found = comparison.compare(keras, keras, {"*_a": "why"})
    assert found.stale == (["*_a"] if is_stale else [])


def test_what_only_keras_fails_is_counted_as_fixed():
    found = comparison.compare({TEST: FAILED}, {TEST: PASSED}, {})
    assert found.fixed == [TEST]
    assert found.failed == (1, 0)


def test_a_failure_in_the_teardown_overrules_a_pass():
    lines = [
        {"test": TEST, "outcome": "passed", "message": ""},
        {"test": TEST, "outcome": "failed", "message": "1 is not 2"},
    ]
    assert comparison.results(lines) == {TEST: FAILED}
    assert comparison.results(lines[::-1]) == {TEST: FAILED}


def test_every_reason_is_a_sentence():
    assert known.REASONS
    for name, reason in known.REASONS.items():
        assert re.match(r"[A-Z].*\.$", reason), name
