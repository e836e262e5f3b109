"""The scaling border around a function, under TensorFlow."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmix._keras import context_values, kernels, tapes, tracing
from tfmix.gradient_scaling import power
from tfmix.ops import tensorflow_products
from tfmix.step import gradients as unscaled_gradients

# The float results of a function, the losses that were added inside, and what
# else it returns.
Results = tuple[list, list, Any]
# A function of float tensors.
Function = Callable[..., Results]


def call(
    function: Function,
    tensors: Sequence,
    *,
    again: Function | None = None,
    overwritten: Collection[int] = (),
) -> Results:
    """Calls a function whose gradients are scaled inside it only.

    Each backward pass finds a power of two that brings the incoming gradients
    to order one, and divides by it where gradients leave, both of tensors and
    of the variables that the function reads. Gradients of these gradients have
    such a border, too; in eager mode that runs the function again for each
    order.

    Args:
        function: Takes tensors; returns results, losses that were added
            inside, whose gradients are often far larger, and anything else.
        tensors: Its arguments, float tensors.
        again: Runs the function again, without side effects. Defaults to the
            function.
        overwritten: The `id`s of tensors and variables whose gradient is their
            next value, which leaves as it is.

    Returns:
        What the function returns.
    """
    tensors = list(tensors)
    # Eager tensors become part of the graph, so that it has their gradients.
    inside = _told_apart(map(tf.convert_to_tensor, tensors))
    # A graph holds its own gradients. Inside a second tape, TensorFlow would
    # differentiate a loop twice, for which it keeps and adds up more.
    is_taped = tf.executing_eagerly() and tapes.is_recorded()
    tape = _tape() if is_taped else None
    with tapes.variables_read() as variables:
        run = _Run(again or function, inside, variables, tape)

        def first(*tensors: Any) -> Results:
            with context_values.holding(outside=run.outside):
                return function(*tensors)

        watched = filter(tapes.reach, inside) if tape else ()
        results, losses, rest = _recorded(tape, first, inside, [*watched])
    pairs = zip(tensors, inside, strict=True)
    copies = [id(new) for given, new in pairs if id(given) in overwritten]
    border = run.border(results, losses, {*overwritten, *copies})
    return (*border.results(tape), rest)


class _Run:
    """One run of a function, which may compute some parts outside.

    A user's gradient function is such a part: it gets the unscaled gradient,
    and what comes before it has a power of two of its own.
    """

    def __init__(
        self,
        again: Function,
        tensors: Sequence,
        variables: Callable[[], list],
        tape: tf.GradientTape | None,
    ) -> None:
        self._again, self._variables, self._tape = again, variables, tape
        self._tensors = list(tensors)
        self._trace = tracing.trace()
        # No part can be outside of a tape that the function opens.
        self._may_leave = True
        # The float32 results of each part, which are arguments of what comes
        # after it, and a function that turns them into its result.
        self._parts: list[tuple[list, Callable]] = []

    def border(
        self,
        results: Sequence,
        losses: Sequence,
        overwritten: Collection[int] = (),
    ) -> "_Border":
        """Returns the border of everything that led to these results."""
        again = functools.partial(self._run_again, len(self._parts))
        tensors = [
            *self._tensors,
            *(x for made, _ in self._parts for x in made),
        ]
        variables, both = self._variables(), (list(results), list(losses))
        return _Border(again, tensors, variables, both, overwritten)

    def outside(self, compute: Callable, tensors: list) -> Any:
        """Computes a part of the function outside of the border.

        Args:
            compute: Takes the tensors in float32. Returns float32 results, and
                a function that turns them into the result.
            tensors: Its arguments, float tensors.

        Returns:
            The result; `None` inside another function, whose gradient is traced
            before the power of two is known.
        """
        is_here = tracing.trace() == self._trace
        if not (is_here and self._may_leave and tensors):
            # Nothing can leave a loop or a branch before its end.
            known = is_here or tapes.is_part_of(self._trace)
            return _inside(compute, tensors) if known else None
        border = self.border(*_by_size(tensors))
        paused = self._tape.stop_recording() if self._tape else _nothing()
        with paused, context_values.holding(outside=None):
            small, large = map(iter, border.results(self._tape))
            made, rebuilt = compute(
                [next(small if _is_small(x) else large) for x in tensors]
            )
        if self._tape:
            self._tape.watch(made)
        self._parts.append((made, rebuilt))
        return rebuilt(made)

    def stay(self) -> None:
        """Lets no further part be computed outside."""
        self._may_leave = False

    def _run_again(self, count: int, *given: Any) -> Results:
        """Runs the function again, as far as its part of this number.

        Args:
            count: The number of parts before the results.
            *given: The arguments of the function, and those parts' results.
        """
        first = len(self._tensors)
        entered, left = iter(given[first:]), list[tuple[list, list]]()

        def outside(compute: Callable, tensors: list) -> Any:
            if len(left) == len(self._parts):
                return _inside(compute, tensors)
            made, rebuilt = self._parts[len(left)]
            left.append(_by_size(tensors))
            # Later parts do not count.
            return rebuilt([next(entered, known) for known in made])

        with context_values.holding(outside=outside):
            results, losses, _ = self._again(*given[:first])
        return (
            *(left[count] if count < len(left) else (results, losses)),
            None,
        )


def staying(original: Callable) -> Callable:
    """Returns a tape's `__enter__`: inside a border, parts then stay inside."""

    @functools.wraps(original)
    def enter(self: tf.GradientTape) -> tf.GradientTape:
        run = getattr(context_values.block.get().outside, "__self__", None)
        if isinstance(run, _Run):
            run.stay()
        return original(self)

    return enter


def _inside(compute: Callable, tensors: list) -> Any:
    """Computes a part that sees the power of two of its gradient."""
    made, rebuilt = compute(tensors, is_outside=False)
    return rebuilt(made)


def _by_size(tensors: Sequence) -> tuple[list, list]:
    """Returns 16-bit tensors in float32, and other tensors.

    The latter may be the state of a quantized layer, far larger than gradients.
    """
    with _as_written():
        small = [kernels.cast(x, tf.float32) for x in tensors if _is_small(x)]
        return small, [tf.identity(x) for x in tensors if not _is_small(x)]


def _is_small(tensor: Any) -> bool:
    return bool(tensor.dtype.size < 4)


_nothing = contextlib.nullcontext


def _told_apart(tensors: Iterable) -> list:
    """Copies repeated tensors: a tape has one gradient per tensor."""
    apart: dict[int, Any] = {}
    for tensor in tensors:
        new = tf.identity(tensor) if id(tensor) in apart else tensor
        apart[id(new)] = new
    return list(apart.values())


def _tape() -> tf.GradientTape:
    # In eager mode an outer tape may use it more than once. In a graph a
    # persistent tape keeps the graph alive forever.
    return tf.GradientTape(persistent=tf.executing_eagerly())


def _recorded(
    tape: tf.GradientTape | None,
    function: Function,
    tensors: Sequence,
    watched: Sequence | None = None,
) -> Results:
    """Returns a function's results, recorded by a tape if there is one.

    Args:
        tape: The tape.
        function: The function.
        tensors: Its arguments.
        watched: Those that gradients are asked of. Defaults to all.
    """
    if tape is None:
        return function(*tensors)
    with tape:
        tape.watch(tensors if watched is None else watched)
        return function(*tensors)


class _Border:
    """Scales the gradients of one run of a function."""

    def __init__(
        self,
        again: Function,
        tensors: Sequence,
        variables: Sequence,
        results: tuple[list, list],
        overwritten: Collection[int] = (),
    ) -> None:
        self._again = again
        self._tensors, self._variables = list(tensors), list(variables)
        self._results = results
        self._handles = tapes.handles(variables)
        self._factor = context_values.block.get().place
        self._trace = tracing.trace()
        self._as_values = {
            n
            for n, x in enumerate((*self._tensors, *self._variables))
            if id(x) in overwritten
        }

    def results(self, tape: tf.GradientTape | None) -> tuple[list, list]:
        """Returns results whose gradients are scaled inside.

        Args:
            tape: The tape that recorded the run, if there is one.
        """
        of_results, of_losses = self._results
        # A loop would compute a gradient that nobody gets in every step.
        is_asked = [*map(tapes.reach, self._tensors)]
        made = tapes.replaced(
            [*of_results, *of_losses],
            self._tensors,
            self._variables,
            by_tape=functools.partial(self._gradient, tape, is_asked),
            # A graph that held a tape would never be freed.
            by_graph=functools.partial(
                self._gradient, None, [True] * len(is_asked)
            ),
        )
        return made[: len(of_results)], made[len(of_results) :]

    def _gradient(
        self,
        tape: tf.GradientTape | None,
        is_asked: Sequence,
        *upstream: Any,
    ) -> list:
        count = len(self._results[0])
        with _as_written():
            by = power.of(upstream[:count], upstream[count:], self._factor)
            scaled = [_times(by.up, gradient) for gradient in upstream]
        with context_values.holding(power=by, outside=_inside):
            inside = self._inside(tape, is_asked, scaled)
        kept = [n for n, g in enumerate(inside) if g is not None]
        values = [_values(inside[n]) for n in kept]
        # In another graph, such as that of a nested `tf.function`'s gradient,
        # the results of this one cannot be differentiated again.
        if tapes.is_recorded() and tracing.trace() == self._trace:
            pull = functools.partial(self._pull, by, kept)
            with context_values.holding(place=self._factor):
                border = _Border(
                    pull,
                    [*self._tensors, *scaled],
                    self._variables,
                    (values, []),
                )
            values, _ = border.results(None)
        # Gradients of the arguments come first. They need not show why they are
        # not finite, because no optimizer gets them.
        of_variables = [
            value
            for n, value in zip(kept, values, strict=True)
            if n >= len(self._tensors)
        ]
        says_why = [False] * (len(values) - len(of_variables))
        says_why += unscaled_gradients.become_infinite(of_variables)
        with _as_written():
            unscaled = _all_unscaled(by.down, values, says_why)
            for n, true in zip(kept, unscaled, strict=True):
                if n not in self._as_values:
                    inside[n] = _as_before(inside[n], true)
        return inside

    def _inside(
        self,
        tape: tf.GradientTape | None,
        is_asked: Sequence,
        scaled: Sequence,
    ) -> list:
        """Returns the gradients of the tensors, then of the variables.

        Args:
            tape: The tape that recorded the run, if there is one.
            is_asked: Whether to compute the gradient of each tensor.
            scaled: The gradients of the results.
        """
        results: Sequence[Any] = self._results
        asked = list(itertools.compress(self._tensors, is_asked))
        if self._trace != tracing.EAGER:
            found = tapes.of_graph(
                [*results[0], *results[1]],
                [*asked, *self._handles],
                scaled,
                self._tensors,
            )
        else:
            if tape is None:
                tape = _tape()
                results = _recorded(tape, self._again, self._tensors)
            found = self._asked(tape, results, asked, scaled)
        rest = iter(found)
        return [next(rest) if one else None for one in is_asked] + [*rest]

    def _asked(
        self,
        tape: tf.GradientTape,
        results: Sequence[list],
        tensors: Sequence,
        scaled: Sequence,
    ) -> list:
        sources = [*tensors, *self._handles]
        return tapes.of_tape(tape, [*results[0], *results[1]], sources, scaled)

    def _pull(self, by: power.Power, kept: Sequence, *given: Any) -> Results:
        """Computes the inner gradients again, as results of a border."""
        count = len(self._tensors)
        tensors, scaled = given[:count], given[count:]
        tape = _tape()
        results = _recorded(tape, self._again, tensors)
        with context_values.holding(power=by, outside=_inside):
            inside = self._asked(tape, results, tensors, scaled)
        return [_values(inside[n]) for n in kept], [], None


def _values(gradient: Any) -> Any:
    """Returns a gradient's numbers; of a sparse one, those of its rows."""
    return getattr(gradient, "values", gradient)


def _as_before(gradient: Any, values: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def _as_written() -> contextlib.AbstractContextManager[None]:
    """Runs a block by no rules: they are for the code of models."""
    return context_values.holding(rules=context_values.NO_RULES)


def _all_unscaled(down: Any, values: list, says_why: Sequence) -> list:
    """Divides gradients; where infinity may stand, it is an overflow inside.

    Args:
        down: The factor; NaN if an incoming gradient was not finite.
        values: The gradients.
        says_why: Whether each must be infinity after an overflow. Others may
            leave as they were computed.
    """
    # Infinity, unless `down` is NaN.
    lost = tf.raw_ops.AddV2(x=down, y=math.inf)
    small = [
        n
        for n, (value, says) in enumerate(zip(values, says_why, strict=True))
        if says
        and unscaled_gradients.is_small(value)
        and value.dtype == tf.float32
    ]
    if len(small) < 2 or not tracing.by_gpu_kernels():
        small = []
    shown = [says and n not in small for n, says in enumerate(says_why)]
    unscaled = [
        _unscaled(down, value, lost if says else None)
        for value, says in zip(values, shown, strict=True)
    ]
    if small:
        # A kernel for a few numbers takes as long as one for all of them.
        together = _unscaled_together(down, [values[n] for n in small], lost)
        for n, value in zip(small, together, strict=True):
            unscaled[n] = value
    return unscaled


def _unscaled_together(down: Any, values: list, lost: Any) -> list:
    sizes = [math.prod(value.shape) for value in values]
    pairs = list(map(tensorflow_products.parts, values))
    for n, (_, factor) in enumerate(pairs):
        if not isinstance(factor, float):
            pairs[n] = values[n], 1.0
    flat = [tf.reshape(tensor, [-1]) for tensor, _ in pairs]
    factors = np.repeat([factor for _, factor in pairs], sizes)
    downs = down * factors.astype("float32") if (factors != 1).any() else down
    whole = _unscaled(downs, tf.concat(flat, 0), lost)
    return [
        tf.reshape(part, value.shape)
        for part, value in zip(tf.split(whole, sizes), values, strict=True)
    ]


def _unscaled(down: Any, gradient: Any, lost: Any) -> Any:
    """Divides a gradient; one that is not finite becomes `lost`, if given."""
    tensor, factor = tensorflow_products.parts(gradient)
    result = _times(down if factor is None else down * factor, tensor)
    if lost is None:
        return result
    lost = kernels.cast(lost, tensor.dtype)
    real = tf.math.real(tensor) if tensor.dtype.is_complex else tensor
    is_finite = tf.raw_ops.IsFinite(x=real)
    return tf.raw_ops.SelectV2(condition=is_finite, t=result, e=lost)


def _times(factor: Any, tensor: Any) -> Any:
    # Float32 holds every factor.
    if tensor.dtype == tf.float32:
        # It is quick to trace, for hundreds of gradients.
        return tf.raw_ops.Mul(x=tensor, y=factor)
    wide = kernels.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
    return kernels.cast(wide * kernels.cast(factor, wide.dtype), tensor.dtype)
