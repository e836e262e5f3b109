"""Looks at the batches that go into a model's training function."""

import itertools
from collections.abc import Callable
from typing import Any

import keras


class Tap:
    """Stands for `model.train_function` and shows some batches to a function.

    Before the step `step`, `look` gets the state, which is the values of all
    variables on JAX and None on TensorFlow, and the batch.
    """

    def __init__(
        self,
        original: Any,
        model: keras.Model,
        every: int,
        look: Callable[[Any, Any], None],
        step: int,
    ) -> None:
        self.original, self.step = original, step
        self._every, self._look = every, look
        # One call makes several steps where `steps_per_execution` says so.
        self._stride = max(int(model.steps_per_execution), 1)
        # The first step of a run, then every multiple.
        self._next = -(-step // every) * every

    def __call__(self, *arguments: Any) -> Any:
        """Makes the training step or steps."""
        *state, batches = arguments
        if self.step < self._next:
            outputs = self.original(*state, batches)
        else:
            self._next = self.step - self.step % self._every + self._every
            batch = next(batches)
            self._look(state[0] if state else None, first_replica(batch))
            # The batch goes back in front of those to come.
            outputs = self.original(*state, itertools.chain([batch], batches))
        self.step += self._stride
        return outputs


def original(function: Any) -> Any:
    """Returns a training function without the tap, if it has one."""
    while isinstance(function, Tap):
        function = function.original
    return function


def first_replica(batch: Any) -> Any:
    """Returns what the first replica gets of a distributed batch."""

    def first(leaf: Any) -> Any:
        # Known by name, so that TensorFlow need not be imported.
        if type(leaf).__name__ in ("PerReplica", "DistributedValues"):
            return leaf.values[0]
        return leaf

    return keras.tree.map_structure(first, batch)
