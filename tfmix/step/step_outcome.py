"""Records what each `apply` in a train step did: applied, skipped, neither.

Each `apply`, of any optimizer, reports to the step around it. Keras's own step
calls one `apply`, in no branch: what that reports is the answer. Elsewhere
TensorFlow counts the reports in a variable, which every branch of a conditional
reaches. Under JAX a step is a function of its state, so the optimizer's own
counters are used; they are part of that state.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfmix._keras import compilation, context_values, optimizers, training
from tfmix.step import replicas


class Outcome(NamedTuple):
    """The outcome of a step: booleans, or boolean scalar tensors.

    Attributes:
        applied: Whether an `apply` changed weights.
        skipped: Whether an `apply` changed nothing.
    """

    applied: Any
    skipped: Any


@dataclasses.dataclass
class Step:
    """A train step while it runs or is traced.

    Attributes:
        model: The model whose step it is.
        is_own: Whether the user wrote the `train_step`. Keras's own applies
            gradients once, whatever happens.
        counter: TensorFlow's `Counter`; `None` under JAX, and where no branch
            has to reach it.
        watched: The `id`s of what a guard restores if the step is skipped.
        updated: The `id`s of the variables that an `apply` got.
        scaled: The `id`s of the optimizers that scaled a loss.
        flags: What the `apply`s reported that the step itself called, not a
            branch in it.
        trace: The `compilation.trace` of the step.
        counts: What the counter held when the step began.
    """

    model: keras.Model
    is_own: bool
    counter: "Counter | None" = None
    watched: frozenset[int] = frozenset()
    updated: set[int] = dataclasses.field(default_factory=set)
    scaled: set[int] = dataclasses.field(default_factory=set)
    flags: list[Any] = dataclasses.field(default_factory=list)
    trace: Any = dataclasses.field(default_factory=compilation.trace)
    counts: Any = None

    def outcome(self) -> Outcome:
        """Returns what the `apply`s did; without a counter, in no branch."""
        if self.counter is not None:
            return self.counter.since(self.counts)
        skips = [ops.logical_not(applied) for applied in self.flags]
        return Outcome(_any(self.flags), _any(skips))


def around() -> Step | None:
    """Returns the train step around the caller, `None` if there is none."""
    step: Step | None = context_values.block.get().step
    return step


@contextlib.contextmanager
def step(
    model: keras.Model, counter: "Counter | None", watched: Iterable[int]
) -> Iterator[Step]:
    """Makes every `apply` inside a block report to one step."""
    if (outside := around()) is not None:
        # What happens in this step happens in that one, too.
        counter = outside.counter or counter
    counts = None if counter is None else counter.read()
    is_own = training.has_own_step(model)
    new = Step(model, is_own, counter, frozenset(watched), counts=counts)
    with context_values.holding(step=new):
        yield new


def note_update(variables: Iterable) -> None:
    """Tells the step around an `apply` which variables it will update.

    Args:
        variables: The variables. If the step has written one itself before, as
            a search for flat minima does, the optimizer does not own it alone.
    """
    if (step := around()) is not None:
        step.updated |= {id(v) for v in variables if not _is_written(v)}


def report(applied: Any) -> None:
    """Reports an `apply` to the step around it, if there is one.

    Args:
        applied: Bool or boolean scalar tensor, whether it changed anything.
    """
    if (step := around()) is None:
        return
    if compilation.trace() == step.trace:
        step.flags.append(applied)
    if step.counter is not None:
        step.counter.add(applied)


class Counter:
    """Counts the applied and skipped `apply`s of one model's steps.

    The counts only grow, so that a nested step may share them: the result of a
    step is the difference between its end and its start.
    """

    def __init__(self) -> None:
        self._counts: Any = None

    @property
    def variables(self) -> list[keras.Variable]:
        """The variable with the counts, once it exists."""
        return [] if self._counts is None else [self._counts]

    def read(self) -> Any:
        """Returns the counts, int32 of shape `(2,)`; creates the variable."""
        if self._counts is None:
            replicas.once_for_all(self._create)
        with replicas.one_replica([self._counts]):
            return compilation.read(self._counts)

    def add(self, applied: Any) -> None:
        """Counts one `apply`."""
        flags = ops.stack([applied, ops.logical_not(applied)])
        with replicas.one_replica([self._counts]):
            self._counts.assign_add(ops.cast(flags, "int32"))

    def since(self, before: Any) -> Outcome:
        """Returns what happened since the counts were read."""
        more = self.read() > before
        return Outcome(more[0], more[1])

    def _create(self) -> None:
        self._counts = keras.Variable(
            np.zeros(2), "zeros", "int32", trainable=False
        )


def of_optimizer(
    optimizer: Any, is_own: bool, before: Callable, after: Callable
) -> Outcome:
    """Returns what an optimizer did between two states (JAX).

    Args:
        optimizer: The optimizer. An unwrapped one counts no skipped steps, so a
            skip in a user's own step cannot be known.
        is_own: Whether the user wrote the `train_step`.
        before: Returns a variable's value before the step.
        after: Returns its current value.
    """
    applies = optimizers.applies(optimizer)
    applied = ops.not_equal(before(applies), after(applies))
    skips = getattr(optimizer, "skips", None)
    if skips is not None:
        skipped = ops.not_equal(before(skips), after(skips))
    else:
        skipped = False if is_own else ops.logical_not(applied)
    return Outcome(applied, skipped)


def _any(flags: list) -> Any:
    return functools.reduce(ops.logical_or, flags) if flags else False


def _is_written(variable: Any) -> bool:
    # It is not known for an eager step, or under JAX.
    on_tensorflow = keras.backend.backend() == "tensorflow"
    return on_tensorflow and compilation.may_be_written(variable)
