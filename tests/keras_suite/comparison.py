"""Compares the outcomes of one set of tests under two policies."""

import fnmatch
from typing import NamedTuple


class Result(NamedTuple):
    """What came of a test: `passed`, `failed` or `skipped`, and the message."""

    outcome: str
    message: str


class Comparison(NamedTuple):
    """What two runs of the same tests have in common and what not.

    Attributes:
        count: How many tests both ran.
        failed: How many of them fail under Keras's policy, and under tfmix's.
        new: Each test that passes under Keras's policy alone and for which
            there is no reason, with what came of it.
        known: The others that pass under Keras's policy alone, with the reason.
        stale: Patterns whose tests ran and all pass under tfmix's, too.
        fixed: Tests that fail under Keras's policy alone.
    """

    count: int
    failed: tuple[int, int]
    new: dict[str, str]
    known: dict[str, str]
    stale: list[str]
    fixed: list[str]


def results(lines):
    """Returns the result of each test; a failure overrules a pass."""
    found = {}
    for line in lines:
        result = Result(line["outcome"], line["message"])
        if line["test"] not in found or result.outcome == "failed":
            found[line["test"]] = result
    return found


def compare(keras, tfmix, reasons):
    """Compares the results under Keras's policy with those under tfmix's.

    Args:
        keras: `Result` of each test under Keras's policy.
        tfmix: The same under tfmix's.
        reasons: Why a test may fail under tfmix's policy alone, by a pattern
            of `fnmatch` for its name.
    """
    passed = [name for name in keras if keras[name].outcome == "passed"]
    # One that did not run under tfmix's policy has not passed.
    lost = Result("lost", "it did not run")
    alone = {
        name: ": ".join(tfmix.get(name, lost))
        for name in passed
        if tfmix.get(name, lost).outcome != "passed"
    }
    used = {
        name: pattern
        for name in alone
        for pattern in reasons
        if fnmatch.fnmatchcase(name, pattern)
    }
    stale = [
        pattern
        for pattern in reasons
        if pattern not in used.values() and fnmatch.filter(passed, pattern)
    ]
    return Comparison(
        count=len(keras.keys() & tfmix.keys()),
        failed=(_failures(keras), _failures(tfmix)),
        new={name: alone[name] for name in alone if name not in used},
        known={name: reasons[used[name]] for name in used},
        stale=stale,
        fixed=[
            name
            for name in tfmix.keys() & keras.keys()
            if tfmix[name].outcome == "passed"
            and keras[name].outcome == "failed"
        ],
    )


def table(title, found):
    """Returns a comparison as text."""
    lines = [
        f"{title}: {found.count} tests; {found.failed[0]} fail under Keras's "
        f"policy, {found.failed[1]} under tfmix's, {len(found.fixed)} under "
        f"Keras's alone, {len(found.known)} under tfmix's alone for a known "
        f"reason, {len(found.new)} for no known reason"
    ]
    lines += [f"  NEW {name}\n      {text}" for name, text in found.new.items()]
    lines += [f"  known, but it passes: {one}" for one in found.stale]
    lines += [f"  known {name}: {text}" for name, text in found.known.items()]
    return "\n".join(lines)


def _failures(results):
    return sum(result.outcome == "failed" for result in results.values())
