"""Modules that answer questions, each in its own process."""

import pytest

from benchmarks import answers

MODULE = """
import sys
from benchmarks import answers

print("a library greets")
for number in map(int, sys.argv[1:]):
    if number < 0:
        raise SystemExit(3)
    answers.answer({"twice": 2 * number})
"""


@pytest.fixture
def environment(tmp_path):
    """An environment with a module that answers with twice the number."""
    (tmp_path / "doubling.py").write_text(MODULE)
    return {"PYTHONPATH": str(tmp_path)}


def test_a_module_answers_once_or_many_times(environment):
    found = answers.answers_of("doubling", "1", "2", environment=environment)
    assert list(found) == [{"twice": 2}, {"twice": 4}]
    found = answers.answer_of("doubling", "3", environment=environment)
    assert found == {"twice": 6}


def test_a_failing_module_is_named_after_its_answers(environment):
    found = answers.answers_of("doubling", "4", "-1", environment=environment)
    assert next(found) == {"twice": 8}
    with pytest.raises(RuntimeError, match="doubling 4 -1 ended with .* 3"):
        next(found)
