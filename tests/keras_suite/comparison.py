"""Compares the outcomes of one set of tests under two policies."""

import fnmatch
from typing import NamedTuple


class Result(NamedTuple):
    """A test's outcome, `passed`, `failed` or `skipped`, and the message."""

    outcome: str
    message: str


class Comparison(NamedTuple):
    """The outcomes of a set of tests under tfmix's policy and under Keras's.

    Attributes:
        count: How many tests ran under tfmix's policy.
        failed: How many fail under both policies.
        new: Each test that does worse under tfmix's policy and for which there
            is no reason, with what came of it.
        known: The others that do worse under tfmix's policy, with the reason.
        stale: Patterns whose tests ran and all pass under tfmix's.
    """

    count: int
    failed: int
    new: dict[str, str]
    known: dict[str, str]
    stale: list[str]


def results(lines):
    """Returns the result of each test; a failure overrules a pass."""
    found = {}
    for line in lines:
        result = Result(line["outcome"], line["message"])
        if line["test"] not in found or result.outcome == "failed":
            found[line["test"]] = result
    return found


def not_passed(tfmix):
    """Returns the names of the tests to run under Keras's policy as well."""
    return [name for name in tfmix if tfmix[name].outcome != "passed"]


def compare(keras, tfmix, reasons):
    """Compares the results under Keras's policy with those under tfmix's.

    Args:
        keras: `Result` of each test of `not_passed` under Keras's policy.
        tfmix: `Result` of each test under tfmix's.
        reasons: Why a test may do worse under tfmix's policy, by a pattern of
            `fnmatch` for its name.
    """
    # A file that tfmix keeps from being imported has tests under Keras alone.
    lost = Result("lost", "it did not run")
    worse = {
        name: ": ".join(tfmix.get(name, lost))
        for name in keras
        if _is_worse(tfmix.get(name, lost), keras[name])
    }
    used = {
        name: pattern
        for name in worse
        for pattern in reasons
        if fnmatch.fnmatchcase(name, pattern)
    }
    return Comparison(
        count=len(tfmix),
        failed=sum(
            tfmix[name].outcome == keras[name].outcome == "failed"
            for name in tfmix.keys() & keras.keys()
        ),
        new={name: worse[name] for name in worse if name not in used},
        known={name: reasons[used[name]] for name in used},
        stale=[
            pattern
            for pattern in reasons
            if pattern not in used.values()
            and any(
                result.outcome == "passed"
                and fnmatch.fnmatchcase(name, pattern)
                for name, result in tfmix.items()
            )
        ],
    )


def table(title, found):
    """Returns a comparison as text."""
    lines = [
        f"{title}: {found.count} tests; {found.failed} fail under both "
        f"policies, {len(found.known)} do worse under tfmix's for a known "
        f"reason, {len(found.new)} for no known reason"
    ]
    lines += [f"  NEW {name}\n      {text}" for name, text in found.new.items()]
    lines += [f"  known, but it passes: {one}" for one in found.stale]
    lines += [f"  known {name}: {text}" for name, text in found.known.items()]
    return "\n".join(lines)


def _is_worse(tfmix, keras):
    # A test that expects the digits of float32 fails under both policies, which
    # must not hide another error under tfmix's.
    if tfmix.outcome == keras.outcome == "failed":
        return _error(tfmix) != _error(keras)
    return keras.outcome == "passed" and tfmix.outcome != "passed"


def _error(result):
    """Returns the name of the error that a message begins with."""
    return result.message.partition(":")[0]
