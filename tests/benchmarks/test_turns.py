"""Workers that answer in turn, each in a process of its own."""

import textwrap

import pytest

from benchmarks import turns

WORKER = """
from benchmarks import turns

def answer(number, half=False):
    print("a library greets")
    if number < 0:
        raise ValueError(f"number={number}")
    if number == 13:
        raise SystemExit(3)
    return number / 2 if half else number * 2

turns.serve(answer)
"""


@pytest.fixture
def worker(tmp_path):
    """A worker in a process that answers a number with twice or half of it."""
    (tmp_path / "doubling.py").write_text(textwrap.dedent(WORKER))
    with turns.Worker(
        "doubling", environment={"PYTHONPATH": str(tmp_path)}
    ) as started:
        yield started


def test_a_worker_answers_in_turn_and_goes_on_after_an_error(worker):
    assert worker.ask(number=4) == 8
    assert worker.ask(number=4, half=True) == 2
    with pytest.raises(RuntimeError, match="ValueError: number=-1"):
        worker.ask(number=-1)
    assert worker.ask(number=5) == 10


def test_a_worker_that_ends_is_named(worker):
    with pytest.raises(RuntimeError, match="doubling ended with exit code 3"):
        worker.ask(number=13)
