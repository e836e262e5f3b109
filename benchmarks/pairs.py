"""Takes measurements in turns, and compares them with the first one.

A slow moment of the machine affects all measurements of a turn, so ratios are
taken within a turn.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import results


def in_turns(
    measures: Mapping[Any, Callable[[], float]], turns: int, warm: int = 1
) -> dict[Any, list[float]]:
    """Returns the measurements of each function, turn by turn.

    Args:
        measures: Dict of names to functions that measure once.
        turns: The number of turns.
        warm: The number of earlier turns, for compilation.
    """
    found: dict[Any, list[float]] = {name: [] for name in measures}
    for turn in results.track(range(warm + turns), "turns"):
        # The order alternates, so that none always follows the same other one.
        for name in list(measures)[:: 1 if turn % 2 else -1]:
            measured = measures[name]()
            if turn >= warm:
                found[name].append(measured)
    return found


def timed(step: Callable[[], Any], repeats: int = 1) -> Callable[[], float]:
    """Returns a function that measures the milliseconds of a step."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return 1e3 * (time.perf_counter() - start) / repeats

    return measure


def compared(
    column: str,
    steps: Mapping[str, Callable[[], Any]],
    turns: int,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Times steps in turns; returns a row for each.

    Args:
        column: The column of the names.
        steps: Dict of names to steps; the first is the baseline.
        turns: The number of turns.
        repeats: How often a step runs in a turn.

    Returns:
        Rows with `ms` and `ratio` to the baseline: medians and quartiles.
    """
    measures = {name: timed(step, repeats) for name, step in steps.items()}
    times = in_turns(measures, turns)
    (base, *_) = times.values()
    return [
        {
            column: name,
            "ms": results.spread(own, quartiles=True),
            "ratio": results.spread(
                [a / b for a, b in zip(own, base, strict=True)], quartiles=True
            ),
        }
        for name, own in times.items()
    ]
