"""Counts and times all train steps of a process.

A step is what applies gradients once: of one optimizer, or of several in one
`train_step` or one compiled function. In eager loops a step begins when an
optimizer applies again. The clock is read between two steps. The first steps
are timed one by one, and later ones for a quarter of a second at a time,
because each reading waits for the device.
"""

import collections
import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfmix._keras import context, optimizers, replacing
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import state
from tfmix.tools.run import compiled_calls, verdict

_SECONDS = 0.25
# The clock is read after each of so many calls at most.
_MOST_READINGS = 500
_ON_JAX = keras.backend.backend() == "jax"


class Counter:
    """The steps of one optimizer, which it does not keep alive.

    Attributes:
        eager: How often it was applied outside of step functions.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._iterations = optimizers.applies(optimizer)
        self._start = keras_variables.value_outside(self._iterations)
        # A variable, or the counter of an unwrapped optimizer.
        self._skips: Any = None
        self.calls, self.eager = 0, 0

    def find_skips(self) -> None:
        """Finds what counts the skipped steps."""
        optimizer = self._optimizer()
        if self._skips is None and optimizer is not None:
            self._skips = _skips(optimizer)

    def applied(self) -> int:
        """Returns how often step functions applied it, with skipped steps."""
        now = self._now()
        if now is None:
            return self.calls
        counted = now + (self.skipped() or 0) - self.eager
        # A function that JAX compiles may not write its count back.
        return max(counted, self.calls) if _ON_JAX else counted

    def _now(self) -> int | None:
        """Returns the count of applied steps, None if it cannot be read."""
        now, start = (
            keras_variables.value_outside(self._iterations),
            self._start,
        )
        return None if now is None or start is None else int(now - start)

    def skipped(self) -> int | None:
        """Returns the number of skipped steps, None if nothing counts them."""
        skipped = self._skips
        if isinstance(skipped, keras.Variable):
            skipped = keras_variables.value_outside(skipped)
        elif skipped is not None:
            skipped = skipped.skipped_steps
        # A loop under JAX that writes nothing back has a count of its own.
        is_unwritten = _ON_JAX and self.calls and self._now() == 0
        if skipped is None or (is_unwritten and not skipped):
            return None
        return int(skipped)


def _skips(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns what counts an optimizer's skips, or None."""
    if isinstance(optimizer, scaling.LossScaleOptimizer):
        return next(v for v in optimizer.variables if v.name == "skipped_steps")
    return state.counts_of(optimizer)


class Losses:
    """The latest losses of a run, whose length is not known before."""

    _MOST = 256

    def __init__(self) -> None:
        self._kept: collections.deque = collections.deque(maxlen=self._MOST)
        self._seen = 0

    def __bool__(self) -> bool:
        return self._seen > 0

    def add(self, loss: Any) -> None:
        """Notes a loss, which need not be computed yet."""
        self._kept.append(loss)
        self._seen += 1

    def last_tenth(self) -> float | None:
        """Returns the mean over the last tenth, `None` if it is not known.

        Of a long run, it is that of the last 256. A few bad batches do not
        count. It is not finite if most of them are not.
        """
        # At the end of an epoch, Keras makes a call without a batch.
        for count in (math.ceil(self._seen / 10), 2):
            losses = [*self._kept][-count:]
            known = [x for x in map(_number, losses) if x is not None]
            if known:
                break
        finite = [loss for loss in known if math.isfinite(loss)]
        if 2 * len(finite) > len(known):
            return float(np.mean(finite))
        return known[-1] if known else None


class Group:
    """The steps of one function, or of eager code that begins with one apply.

    Attributes:
        calls: The number of calls of the function, or of eager steps.
        counters: The counters of all optimizers that were applied.
        first: Seconds from the function's call to the end of its first step.
        losses: The losses of its calls.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.counters: set[Counter] = set()
        self.first: float | None = None
        # The clock at some calls, with the steps until then.
        self._marks: list[tuple[float, int]] = []
        self.losses = Losses()

    def called(
        self, counters: list[Counter], began: float, outputs: Any
    ) -> None:
        """Notes a call of a step function that has returned."""
        for counter in counters:
            counter.calls += 1
        self.counters.update(counters)
        if (loss := _loss(outputs)) is not None:
            self.losses.add(loss)
        self._read(counters, outputs, lambda: steps_of(counters))
        if self.calls == 1:
            self.first = self._marks[0][0] - began

    def applied(self, counter: Counter) -> None:
        """Notes a step of eager code, which begins with this counter's."""
        # Eager code has applied it by now, so each call is a step.
        self._read([counter], None, lambda: self.calls)

    def _read(
        self,
        counters: list[Counter],
        outputs: Any,
        steps: Callable[[], int],
    ) -> None:
        """Counts a call, and reads the clock at some calls."""
        self.calls += 1
        for counter in counters:
            counter.find_skips()
        is_enough = self.steps_timed() >= verdict.LEAST_STEPS
        if is_enough or len(self._marks) >= _MOST_READINGS:
            if time.perf_counter() - self._marks[-1][0] < _SECONDS:
                return
        if _ON_JAX:
            compiled_calls.wait(outputs)
        self._marks.append((time.perf_counter(), steps()))

    def steps_timed(self) -> int:
        """Returns the number of timed steps."""
        return self._marks[-1][-1] - self._marks[0][-1] if self._marks else 0

    def milliseconds(self) -> float | None:
        """Returns the median time of a step, without the first."""
        each, _ = self._times()
        return float(np.median(each)) if each.size else None

    def blocks(self) -> list[float]:
        """Returns the median time of each block of steps, [] for too few."""
        each, made = self._times()
        # The first call, which compiles, was not timed.
        steps = each.size + max(made, default=0)
        is_known = len(made) >= verdict.LEAST_INTERVALS
        if steps < verdict.LEAST_STEPS or not is_known:
            return []
        return verdict.blocks(each)

    def _times(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the milliseconds of each timed step, and steps of each call.

        They are those between two readings of the clock.
        """
        if not self._marks:
            return np.zeros(0), np.zeros(0, int)
        clock, steps = map(np.asarray, zip(*self._marks, strict=True))
        made = np.diff(steps)
        # TensorFlow makes a call without a step at the end of an epoch.
        times, made = np.diff(clock)[made > 0], made[made > 0]
        return np.repeat(1000 * times / made, made), made


def steps_of(counters: Sequence[Counter]) -> int:
    """Returns the train steps of optimizers that are applied together."""
    applied = [each.applied() for each in counters]
    # A critic may be applied five times for each time of its generator.
    return min(filter(None, applied), default=0)


class Steps:
    """All steps of the process, by the function that makes them.

    Args:
        before_first: Is called before the first step of the process.
        after_first: Is called after the first step of each function.
    """

    def __init__(
        self,
        before_first: Callable[[], None],
        after_first: Callable[[], None],
    ) -> None:
        self._before_first, self._after_first = before_first, after_first
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
        # The optimizers that were applied in the current step of eager code,
        # and the number of those steps.
        self._eager: list[Counter] = []
        self._eager_steps = 0
        self._inside = threading.local()
        self._replacements = replacing.Replacements()

    def watch(self) -> None:
        """Watches every step from now on."""
        compiled_calls.listen(self._called)
        places = {
            (owner, "apply"): self._applying for owner in optimizers.appliers()
        }
        self._replacements.set(places)

    def count(self) -> int:
        """Returns the number of steps, skipped ones included."""
        return self._eager_steps + sum(map(steps_of, self._together()))

    def skipped(self) -> int | None:
        """Returns the number of skipped steps, None if nothing counts them."""
        skipped = [
            [each.skipped() for each in counters]
            for counters in self._together()
        ]
        known = [[s for s in each if s is not None] for each in skipped]
        return sum(map(max, filter(None, known))) if any(known) else None

    def _together(self) -> list[list[Counter]]:
        """Returns the counters, those of a common train step together."""
        found: list[set[Counter]] = []
        for counters in [*({each} for each in self._every), *self._shared()]:
            joined = counters.union(*(s for s in found if s & counters))
            found = [s for s in found if not s & counters] + [joined]
        return [[*each] for each in found]

    def _shared(self) -> list[set[Counter]]:
        return [group.counters for group in self.groups if group.counters]

    def longest(self) -> Group | None:
        """Returns the group with the most timed steps."""
        return max(self.groups, key=Group.steps_timed, default=None)

    def _applying(self, original: Callable) -> Callable:
        @context.untouched
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
            if compiled_calls.is_in_step():
                compiled_calls.note(counter)
            else:
                self._applied(optimizer, counter)
            return result

        return apply

    def _counter(self, optimizer: Any) -> Counter:
        counter = self._counters.get(optimizer)
        if counter is None:
            if not self._every:
                self._before_first()
            counter = self._counters[optimizer] = Counter(optimizer)
            self._every.append(counter)
        return counter

    def _applied(self, optimizer: Any, counter: Counter) -> None:
        """Notes an apply in eager code."""
        counter.eager += 1
        if self._eager and counter not in self._eager:
            self._eager.append(counter)
            counter.find_skips()
            return
        self._eager = [counter]
        self._eager_steps += 1
        self._note(optimizer, lambda group: group.applied(counter))

    def _called(
        self, by: Any, counters: list[Any], began: float, outputs: Any
    ) -> None:
        self._eager = []
        group = self._note(
            by, lambda group: group.called(counters, began, outputs)
        )
        if group.losses:
            self.last = group

    def _note(self, by: Any, note: Callable[[Group], None]) -> Group:
        group = self._groups.get(by)
        if group is None:
            group = self._groups[by] = Group()
            self.groups.append(group)
        try:
            note(group)
        except Exception as error:
            # A failed measurement is no reason to stop the script.
            self.error = f"{type(error).__name__}: {error}"
        if group.calls == 1:
            self._after_first()
        return group


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
    # JAX may have overwritten this array, which then cannot be read.
    with contextlib.suppress(Exception):
        if hasattr(loss, "has_value"):
            loss = _loss(loss.get_value()) if loss.has_value() else None
        if loss is not None:
            return float(keras_variables.host_value(loss))
    return None
