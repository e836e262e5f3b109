"""Which cases of a parametrized test the quick run keeps."""

import dataclasses
import itertools
import types

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


def test_a_list_of_one_parameter_is_kept_whole():
    assert sampling.sample(product("abcde")) == [0, 1, 2, 3, 4]


def test_a_test_without_parameters_is_kept():
    assert sampling.sample([frozenset({("test", "")})]) == [0]


def test_no_case_gives_an_empty_sample():
    assert sampling.sample([]) == []


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """What the sample asks of an item of pytest."""

    nodeid: str
    callspec: types.SimpleNamespace | None = None
    every_case: bool = False

    def get_closest_marker(self, name):
        return getattr(self, name)


def items(name, every_case=False, **parameters):
    return [
        Item(
            f"{name}[{case}]",
            types.SimpleNamespace(
                params=dict(zip(parameters, case, strict=True))
            ),
            every_case,
        )
        for case in itertools.product(*parameters.values())
    ]


def test_each_test_is_sampled_by_itself():
    one, other = items("one", a="xy", b="xy"), items("other", a="xy", b="xy")
    kept = sampling.quick([*one, *other, Item("plain")])
    assert len(kept) == 5
    assert {item.nodeid for item in kept} >= {"plain"}


def test_the_last_case_first_gives_other_combinations():
    cases = items("one", a="xyz", b="xyz")
    first, last = cases[0], cases[-1]
    assert first in sampling.quick(cases)
    assert last in sampling.quick(cases, last_first=True)


def test_a_test_marked_every_case_keeps_all():
    cases = items("one", every_case=True, a="xyz", b="xyz")
    assert sampling.quick(cases) == set(cases)
