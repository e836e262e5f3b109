"""Compares the step times of two runs, and says how sure the result is.

The steps of a run are cut into blocks, and the medians of the blocks show how
much the time of a step varies. Two runs differ if their ranges are apart.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

# The times of a run with fewer steps, or fewer readings of the clock between
# them, are not compared.
LEAST_STEPS, LEAST_INTERVALS = 50, 4
BLOCKS = 5
# A smaller difference is none: two runs of one policy may differ as much.
MARGIN = 1.05
# From so many pairs of runs on, each pair counts as one measurement.
_MANY_PAIRS = 3

# Medians in milliseconds, one for each block.
Times: TypeAlias = Sequence[float]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times as fast one run is as another, and the range of that."""

    median: float
    low: float
    high: float

    def is_faster(self) -> bool:
        """Returns whether the first run is faster for certain."""
        return self.low > MARGIN

    def is_slower(self) -> bool:
        """Returns whether the first run is slower for certain."""
        return self.high < 1 / MARGIN

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def blocks(each: np.ndarray) -> list[float]:
    """Returns the median of each block of steps.

    Args:
        each: The time of each step, a 1-D array.

    Example:
        >>> blocks(np.repeat([1.0, 2.0, 3.0, 4.0, 5.0], 10))
        [1.0, 2.0, 3.0, 4.0, 5.0]
    """
    return [float(np.median(part)) for part in np.array_split(each, BLOCKS)]


def compare(pairs: Sequence[tuple[Times, Times]]) -> Ratio:
    """Returns how many times as fast the first runs are as the second ones.

    Args:
        pairs: The times of a run, and of the run it is compared with. Up to two
            pairs are compared block by block, more of them pair by pair.
    """
    medians = [_ratio(pair, np.median, np.median) for pair in pairs]
    found = medians
    if len(pairs) < _MANY_PAIRS:
        found = [_ratio(pair, np.max, np.min) for pair in pairs]
        found += [_ratio(pair, np.min, np.max) for pair in pairs]
    return Ratio(float(np.median(medians)), min(found), max(found))


def _ratio(
    pair: tuple[Times, Times],
    of_first: Callable[[Any], Any],
    of_second: Callable[[Any], Any],
) -> float:
    """Returns the second run's time over the first's."""
    first, second = pair
    return float(of_second(second) / of_first(first))
