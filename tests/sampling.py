"""Chooses the cases of a parametrized test for the quick run."""

import collections
import heapq
import zlib

# Each backend runs all values of a parameter with fewer values.
MANY = 4


def quick(items, left_out, shared, mine):
    """Chooses pytest's items for a quick run.

    It keeps every test without parameters. Of a parametrized test it keeps a
    few cases in which every value of every parameter occurs; all cases if the
    test is marked `every_case`; and one case, under one of the backends, if it
    is marked `costly`.

    Args:
        items: The items that pytest collected.
        left_out: Function that returns whether only the complete run has an
            item.
        shared: Function that returns whether the other backend has an item as
            well. The backends then share the values of a long parameter: one
            tries the first, third and fifth, the other the second and fourth.
        mine: 0 or 1, this backend's part of shared values.

    Returns:
        A set of items.
    """
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept = set()
    for name, cases in tests.items():
        values = [_values(case) for case in cases]
        theirs = _share(values, 1 - mine).difference(
            *(values[n] for n, case in enumerate(cases) if not shared(case))
        )
        able = [n for n, case in enumerate(cases) if not left_out(case)]
        if cases[0].get_closest_marker("every_case"):
            kept.update(cases[n] for n in able)
            continue
        # Another first case leads to other combinations.
        able = able[mine:] + able[:mine]
        chosen = sample([values[n] for n in able], theirs)
        if cases[0].get_closest_marker("costly"):
            backend = zlib.crc32(name.encode()) % 2
            is_theirs = shared(cases[0]) and backend != mine
            chosen = [] if is_theirs else chosen[:1]
        kept.update(cases[able[n]] for n in chosen)
    return kept


def sample(cases, needless=frozenset()):
    """Chooses few cases in which every value of every parameter occurs.

    The next choice is always the first case with the most new values. A full
    product of 2, 3 and 4 values has 24 cases, of which 4 are chosen.

    Args:
        cases: The values of each case, a set of pairs of parameter and value.
        needless: Values that need not occur.

    Returns:
        The indices of the chosen cases, at least one if there are cases.
    """
    missing = set().union(*cases) - needless
    chosen = []
    queue = [(-len(case & missing), n) for n, case in enumerate(cases)]
    heapq.heapify(queue)
    while missing or (cases and not chosen):
        gain, n = heapq.heappop(queue)
        # A gain only falls, so one that has not is still the largest.
        if (now := -len(cases[n] & missing)) != gain:
            heapq.heappush(queue, (now, n))
            continue
        missing -= cases[n]
        chosen.append(n)
    return chosen


def _share(cases, part):
    """Returns every second value of the parameters that have many."""
    found = collections.defaultdict(dict)
    for case in cases:
        for name, value in sorted(case):
            found[name].setdefault((name, value))
    return {
        pair
        for pairs in found.values()
        if len(pairs) >= MANY
        for pair in list(pairs)[part::2]
    }


def _values(item):
    """Pairs each parameter with its value; without parameters, one pair."""
    case = getattr(item, "callspec", None)
    if case is None:
        return {("test", item.nodeid)}
    # Values may have any type, but their `repr` is unique within a process.
    return {(name, repr(value)) for name, value in case.params.items()}
