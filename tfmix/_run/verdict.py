"""Compares the step times of two runs, and says how sure the result is.

The steps of a run are cut into blocks, and the medians of the blocks show how
much the time of a step varies. Two runs differ if their ranges are apart.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

BLOCKS, STEPS_OF_A_BLOCK = 5, 10
# A run with fewer timed steps is not compared.
LEAST_STEPS = BLOCKS * STEPS_OF_A_BLOCK
# A smaller difference is none: two runs of one policy may differ as much. Where
# a CPU computes, what else runs there also slows its arithmetic down.
MARGIN, MARGIN_OF_CPU = 1.05, 1.25
# From so many pairs of runs on, each pair counts as one measurement.
_MANY_PAIRS = 3

# Medians in milliseconds, one for each block, for each clock. Where a CPU
# computes, the second clock is the CPU time of the process: other programs slow
# a step down, but do not add to that.
Times: TypeAlias = Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as fast one run is as another, and the range of that."""

    median: float
    low: float
    high: float
    margin: float  # what two runs of one policy may differ by

    def is_faster(self) -> bool:
        """Returns whether the first run is faster for certain."""
        return self.low > self.margin

    def is_slower(self) -> bool:
        """Returns whether the first run is slower for certain."""
        return self.high < 1 / self.margin

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def blocks(each: np.ndarray) -> list[float]:
    """Returns the median of each block of steps, [] for too few steps.

    Args:
        each: The time of each step, a 1-D array.

    Example:
        >>> blocks(np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 10))
        [1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if len(each) < LEAST_STEPS:
        return []
    return [float(np.median(part)) for part in np.array_split(each, BLOCKS)]


def compare(pairs: Sequence[tuple[Times, Times]]) -> Ratio:
    """Returns how many times as fast the first runs are as the second ones.

    Args:
        pairs: The times of a run, and of the run it is compared with. Up to two
            pairs are compared block by block, more of them pair by pair.
    """
    medians = [_ratios(pair, np.median, np.median) for pair in pairs]
    found = medians
    if len(pairs) < _MANY_PAIRS:
        found = [_ratios(pair, np.max, np.min) for pair in pairs]
        found += [_ratios(pair, np.min, np.max) for pair in pairs]
    return Ratio(
        median=float(np.median([of_clock for of_clock, *_ in medians])),
        low=min(map(min, found)),
        high=max(map(max, found)),
        margin=MARGIN if len(medians[0]) == 1 else MARGIN_OF_CPU,
    )


def _ratios(
    pair: tuple[Times, Times],
    of_first: Callable[[Any], Any],
    of_second: Callable[[Any], Any],
) -> list[float]:
    """Returns for each clock the second run's time over the first's."""
    return [
        float(of_second(second) / of_first(first))
        for first, second in zip(*pair, strict=True)
    ]
