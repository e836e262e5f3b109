"""Logs, history and callbacks are the same as in plain Keras."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from tests import grid, sampling

QUICK, MANY = 2, 2000
# Keras warns about state that no longer fits, and about missing metrics.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("case", grid.sample(QUICK, alike=1), ids=str)
def test_logs_match_plain_keras_without_the_bad_batch(case):
    assert grid.difference(case) == ""


@functools.cache
def cover():
    """Returns a few of the many cases in which every pair of values occurs."""
    many = grid.sample(MANY)
    return [many[n] for n in sampling.sample([*map(pairs, many)])]


def pairs(case):
    fields = dataclasses.fields(case)
    values = [(one.name, repr(getattr(case, one.name))) for one in fields]
    return set(itertools.combinations(values, 2))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_every_pair_of_settings_matches_plain_keras(part):
    wrong = {
        str(case): found
        for case in cover()[part::20]
        if (found := grid.difference(case))
    }
    assert wrong == {}


def test_every_pair_of_settings_occurs():
    every = set().union(*map(pairs, grid.sample(MANY)))
    assert set().union(*map(pairs, cover())) == every
    assert len(cover()) < MANY / 5


def test_the_grid_is_large_and_finds_a_difference(monkeypatch):
    assert len(set(grid.sample(MANY))) == MANY
    case = grid.sample(1)[0]
    found = {"history": {"loss": [1.0, 0.0]}}
    expected = {"history": {"loss": [1.0, np.nan]}}
    monkeypatch.setattr(grid, "_run", lambda case, policy: found)
    monkeypatch.setattr(grid, "_oracle", lambda case: expected)
    assert "[1.0, 0.0]} instead of" in grid.difference(case)
