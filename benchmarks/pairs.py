"""Measurements that take turns, and how they compare with a baseline.

A slow moment of the machine hits all that take turns alike, so a ratio or a
difference is taken within a turn.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import results


def in_turns(
    measures: Mapping[Any, Callable[[], float]], turns: int, warm: int = 1
) -> dict[Any, list[float]]:
    """Returns what each measured, turn by turn.

    Args:
        measures: By name, what measures once.
        turns: How often each does.
        warm: Turns before these, which compile.
    """
    found: dict[Any, list[float]] = {name: [] for name in measures}
    for turn in results.track(range(warm + turns), "turns"):
        # Forwards and backwards: none always follows the same other one.
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
    """Returns what measures the milliseconds of a step."""

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
