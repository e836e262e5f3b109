"""Which gradients can be of a loss that was scaled."""

import collections
from collections.abc import Iterable
from typing import Any

from tfmix._keras import compilation


class ScaledLosses:
    """Counts the losses that are scaled, and what each variable had of them.

    A gradient does not tell where it comes from. But a scaled loss gives each
    variable one gradient. If a variable gets more gradients than losses were
    scaled before, one of them is of no scaled loss. That holds for a loss and
    gradients of one compiled function, or of none. What another compiled
    function scaled may reach any step: Python sees it only while that function
    is traced.
    """

    def __init__(self) -> None:
        self._trace: Any = None
        self._count = 0
        self._served: collections.Counter[int] = collections.Counter()
        self._elsewhere = False

    def add(self, count: int) -> None:
        """Notes that so many losses are scaled here."""
        trace = compilation.trace()
        self._leave(trace)
        if self._served or trace != self._trace:
            self._trace, self._count = trace, 0
            self._served.clear()
        self._count += count

    def may_reach(self, variables: Iterable) -> bool:
        """Says whether gradients of these variables may be of a scaled loss."""
        trace = compilation.trace()
        self._leave(trace)
        here = self.reaches_here(variables)
        if trace != self._trace:
            here = self._trace == compilation.EAGER and not self._served
        return here or self._elsewhere

    def reaches_here(self, variables: Iterable) -> bool:
        """Says whether a loss that was scaled here awaits their gradients."""
        return self._trace == compilation.trace() and all(
            self._served[id(v)] < self._count for v in variables
        )

    def serve(self, variables: Iterable) -> None:
        """Notes that gradients of these variables are used here."""
        if self._trace == compilation.trace():
            self._served.update(map(id, variables))

    def _leave(self, trace: Any) -> None:
        left = self._trace not in (None, compilation.EAGER, trace)
        if left and not self._served:
            self._elsewhere = True
