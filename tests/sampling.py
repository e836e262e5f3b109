"""Which cases of a parametrized test the quick run keeps."""

import collections


def quick(items, last_first=False):
    """Chooses from pytest's items what a quick run keeps.

    That is every test that is not parametrized, and of a parametrized one a
    few cases in which every value of every parameter occurs.

    Args:
        items: What pytest collected.
        last_first: Whether to begin with the last case of each test, which
            chooses other combinations.

    Returns:
        A set of items.
    """
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for cases in tests.values():
        if cases[0].get_closest_marker("every_case"):
            kept.update(cases)
            continue
        if last_first:
            cases.reverse()
        chosen = sample([_values(case) for case in cases])
        kept.update(cases[n] for n in chosen)
    return kept


def sample(cases):
    """Chooses few cases in which every value of every parameter occurs.

    The case with the most values that no chosen case has is chosen next, the
    first of them if there are several. A full product of 2, 3 and 4 values
    has 24 cases, of which 4 are chosen.

    Args:
        cases: The values of each case, a set of pairs of parameter and value.

    Returns:
        The indices of the chosen cases.
    """
    missing = set().union(*cases)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda n: len(cases[n] & missing))
        missing -= cases[best]
        chosen.append(best)
    return chosen


def _values(item):
    """Pairs each parameter with its value; without parameters, one pair."""
    case = getattr(item, "callspec", None)
    if case is None:
        return {("test", item.nodeid)}
    # Values of any type: their text tells them apart within one process.
    return {(name, repr(value)) for name, value in case.params.items()}
