"""Takes measurements in turns, and compares them with a baseline.

A slow moment of the machine affects all measurements of a turn, so ratios and
differences are taken within a turn.
"""

import time
from collections.abc import Callable, Mapping, Sequence
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


def timed(
    step: Callable[[], Any],
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], float]:
    """Returns a function that measures the milliseconds of a step."""

    def measure() -> float:
        start = clock()
        for _ in range(repeats):
            step()
        return 1e3 * (clock() - start) / repeats

    return measure


def ratios(own: Sequence[float], base: Sequence[float]) -> list[float]:
    """Returns the ratio of each turn."""
    return [a / b for a, b in zip(own, base, strict=True)]


def differences(own: Sequence[float], base: Sequence[float]) -> list[float]:
    """Returns the difference of each turn."""
    return [a - b for a, b in zip(own, base, strict=True)]
