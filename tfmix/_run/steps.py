"""Counts and times all optimizer steps of a process.

A step is an optimizer's `apply`: in `fit`, in the user's own compiled function,
or in eager code. The clock is read between two steps. The first steps are timed
one by one, and later ones for a quarter of a second at a time, because each
reading waits for the device.
"""

import collections
import contextlib
import functools
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfmix._keras import (
    compilation,
    compiled_calls,
    optimizers,
    replacements,
)
from tfmix.autocast import bare_optimizers
from tfmix.loss_scaling import optimizer as scaling

_ONE_BY_ONE = 50
_SECONDS = 0.25
_ON_JAX = keras.backend.backend() == "jax"


class Counter:
    """The steps of one optimizer, which it does not keep alive."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._iterations = optimizers.applies(optimizer)
        self._start = compilation.value_outside(self._iterations)
        # A variable, or the counter of an unwrapped optimizer.
        self._skips: Any = None
        self._calls = 0
        # The cause of skipped steps, from their gradients.
        self.cause = ""

    def called(self) -> None:
        """Counts a call of a step function, and finds its counter of skips."""
        self._calls += 1
        optimizer = self._optimizer()
        if self._skips is None and optimizer is not None:
            self._skips = _skips(optimizer)

    def steps(self) -> int:
        """Returns the number of steps, skipped ones included."""
        now = compilation.value_outside(self._iterations)
        if now is None or self._start is None:
            return self._calls
        counted = int(now - self._start) + (self.skipped() or 0)
        # A function that JAX compiles may not write its count back.
        return max(counted, self._calls) if _ON_JAX else counted

    def skipped(self) -> int | None:
        """Returns the number of skipped steps, None if nothing counts them."""
        if self._skips is None:
            return None
        if not isinstance(self._skips, keras.Variable):
            return int(self._skips.skipped_steps)
        skipped = compilation.value_outside(self._skips)
        return None if skipped is None else int(skipped)

    def note_overflow(self) -> None:
        """Stores the likeliest cause of skips, while the optimizer exists."""
        optimizer = self._optimizer()
        if optimizer is None or not self.skipped():
            return
        counts = _skipper(optimizer).overflow_counts
        worst = max(counts, key=counts.__getitem__, default="")
        if worst and counts[worst]:
            self.cause = (
                "all gradients are NaN or infinite at once, as with NaN in a "
                "batch or in the loss"
                if len(counts) > 1 and len(set(counts.values())) == 1
                else f"the gradient of {worst!r} overflows most often"
            )


def _skips(optimizer: keras.optimizers.Optimizer) -> Any:
    if isinstance(optimizer, scaling.LossScaleOptimizer):
        return next(v for v in optimizer.variables if v.name == "skipped_steps")
    return _skipper(optimizer)


def _skipper(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what counts an optimizer's skips, or None."""
    holder: Any = types.SimpleNamespace(optimizer=optimizer)
    return next(iter(bare_optimizers.skippers(holder)), None)


class Group:
    """The steps of one function, or of one optimizer in eager code."""

    def __init__(self) -> None:
        self.calls = 0
        # Seconds from the call of the function to the end of its first step.
        self.first: float | None = None
        # The clock at some calls, with the steps until then.
        self._marks: list[tuple[float, int]] = []
        # The losses of the last two calls: at the end of an epoch, Keras makes
        # a call without a batch.
        self.losses: collections.deque = collections.deque(maxlen=2)

    def called(
        self, counters: list[Counter], began: float | None, outputs: Any
    ) -> None:
        """Notes a call that has returned."""
        self.calls += 1
        if (loss := _loss(outputs)) is not None:
            self.losses.append(loss)
        for counter in counters:
            counter.called()
        if self.calls > _ONE_BY_ONE:
            if time.perf_counter() - self._marks[-1][0] < _SECONDS:
                return
        if _ON_JAX:
            compiled_calls.wait(outputs)
        steps = sum(counter.steps() for counter in counters)
        self._marks.append((time.perf_counter(), steps))
        for counter in counters:
            counter.note_overflow()
        if self.calls == 1 and began is not None:
            self.first = self._marks[0][0] - began

    def steps_timed(self) -> int:
        """Returns the number of timed steps."""
        return self._marks[-1][1] - self._marks[0][1] if self._marks else 0

    def loss(self) -> float | None:
        """Returns the loss of the last step, None if it is not known."""
        for loss in reversed(self.losses):
            # JAX may have overwritten this array, which then cannot be read.
            with contextlib.suppress(Exception):
                if (number := _number(loss)) is not None:
                    return number
        return None

    def milliseconds(self) -> float | None:
        """Returns the median time of a step, without the first."""
        if self.steps_timed() < 1:
            return None
        clock, steps = map(np.asarray, zip(*self._marks, strict=True))
        made = np.maximum(np.diff(steps), 0)
        each = np.diff(clock) / np.maximum(made, 1)
        return float(1000 * np.median(np.repeat(each, made)))


class Steps:
    """All steps of the process, by the function that makes them."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._counters: weakref.WeakKeyDictionary[Any, Counter] = (
            weakref.WeakKeyDictionary()
        )
        self._every: list[Counter] = []
        self._groups: weakref.WeakKeyDictionary[Any, Group] = (
            weakref.WeakKeyDictionary()
        )
        self.groups: list[Group] = []
        # The latest group that has a loss.
        self.last: Group | None = None
        # The reason that something was not measured, "" if all went well.
        self.error = ""
        self._inside = threading.local()
        self._replacements = replacements.Replacements()

    def watch(self) -> None:
        """Watches every step from now on."""
        compiled_calls.listen(self._called)
        places = {
            (owner, "apply"): self._applying for owner in optimizers.appliers()
        }
        self._replacements.set(places)

    def count(self) -> int:
        """Returns the number of steps."""
        return sum(counter.steps() for counter in self._every)

    def skipped(self) -> int | None:
        """Returns the number of skipped steps, None if nothing counts them."""
        counts = [counter.skipped() for counter in self._every]
        return sum(filter(None, counts)) if set(counts) - {None} else None

    def cause(self) -> str:
        """Returns the cause of skipped steps, from their gradients, or ""."""
        for counter in self._every:
            counter.note_overflow()
        return next((each.cause for each in self._every if each.cause), "")

    def longest(self) -> Group | None:
        """Returns the group with the most timed steps."""
        return max(self.groups, key=Group.steps_timed, default=None)

    def _applying(self, original: Callable) -> Callable:
        @compilation.untouched
        @functools.wraps(original)
        def apply(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "apply", False):
                # An optimizer inside another is a part of its step.
                return original(optimizer, *args, **kwargs)
            counter = self._counter(optimizer)
            self._inside.apply = True
            try:
                result = original(optimizer, *args, **kwargs)
            finally:
                self._inside.apply = False
            if compiled_calls.is_compiling():
                compiled_calls.note(counter)
            else:
                self._called(optimizer, [counter], None, None)
            return result

        return apply

    def _counter(self, optimizer: Any) -> Counter:
        counter = self._counters.get(optimizer)
        if counter is None:
            counter = self._counters[optimizer] = Counter(optimizer)
            self._every.append(counter)
        return counter

    def _called(
        self, by: Any, counters: list[Any], began: float | None, outputs: Any
    ) -> None:
        group = self._groups.get(by)
        if group is None:
            group = self._groups[by] = Group()
            self.groups.append(group)
        try:
            group.called(counters, began, outputs)
        except Exception as error:
            # A failed measurement is no reason to stop the script.
            self.error = f"{type(error).__name__}: {error}"
        if group.losses:
            self.last = group
        if group.calls == 1:
            self._on_first()


def _loss(outputs: Any) -> Any:
    """Returns the likely loss in the results of a step, or None."""
    if hasattr(outputs, "has_value"):
        # A `tf.experimental.Optional` is opened at the end.
        return outputs
    if isinstance(outputs, tuple | list) and outputs:
        outputs = outputs[0]
    if isinstance(outputs, dict):
        named = (v for k, v in outputs.items() if str(k).endswith("loss"))
        outputs = next(named, None)
    is_number = keras.ops.is_tensor(outputs) and outputs.shape == ()
    return outputs if is_number else None


def _number(loss: Any) -> float | None:
    if hasattr(loss, "has_value"):
        loss = _loss(loss.get_value()) if loss.has_value() else None
    return None if loss is None else float(compilation.host_value(loss))
