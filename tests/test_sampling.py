"""The quick run's choice of cases of parametrized tests."""

import dataclasses
import itertools
import types

import pytest

from tests import sampling


def product(*parameters):
    return [
        frozenset(enumerate(values))
        for values in itertools.product(*parameters)
    ]


def test_every_value_occurs_in_as_few_cases_as_the_longest_parameter_has():
    cases = product("ab", "cde", "fghi")
    chosen = [cases[n] for n in sampling.sample(cases)]
    assert len(chosen) == 4
    assert frozenset().union(*chosen) == frozenset().union(*cases)


@pytest.mark.parametrize(
    ("values", "needless", "chosen"),
    [("abcd", [1, 2], [0, 3]), ("ab", [0, 1], [0]), ("", [], [])],
    ids=["a needless value may be missing", "one case is kept", "no case"],
)
def test_needless_values_choose_no_case(values, needless, chosen):
    cases = product(values)
    needless = frozenset().union(*(cases[n] for n in needless))
    assert sampling.sample(cases, needless) == chosen


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """The part of a pytest item that the sample needs."""

    nodeid: str
    marker: str = ""
    callspec: types.SimpleNamespace | None = None

    def get_closest_marker(self, name):
        return name == self.marker


def items(name, marker="", **parameters):
    product = itertools.product(*parameters.values())
    named = [dict(zip(parameters, case, strict=True)) for case in product]
    return [
        Item(f"{name}[{case}]", marker, types.SimpleNamespace(params=case))
        for case in named
    ]


def quick(items, left_out=(), shared=(), mine=0):
    return sampling.quick(
        items,
        left_out=lambda item: item in left_out,
        shared=lambda item: item in shared,
        mine=mine,
    )


def test_a_test_without_parameters_is_kept_under_both_backends():
    plain = Item("plain")
    for mine in (0, 1):
        assert quick([plain], shared=[plain], mine=mine) == {plain}


def test_the_backends_share_the_values_of_a_long_parameter():
    cases = items("one", a="abcdef", b="xy")
    kept = [quick(cases, shared=cases, mine=mine) for mine in (0, 1)]
    letters = [{item.callspec.params["a"] for item in each} for each in kept]
    assert letters == [{*"ace"}, {*"bdf"}]
    for each in kept:
        assert {item.callspec.params["b"] for item in each} == {"x", "y"}


def test_a_marker_keeps_every_case_or_one():
    cases = items("one", marker="every_case", a="xy", b="xy")
    assert quick(cases) == set(cases)
    cases = items("one", marker="costly", a="xy", b="xy")
    assert quick(cases) == {cases[0]}
    assert quick(cases, mine=1) == {cases[1]}
