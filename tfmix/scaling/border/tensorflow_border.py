"""A border around a function, under TensorFlow."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmix._keras import compilation, gradients
from tfmix.scaling.border import power

# Float tensors: the results of a function, and losses added on the way.
Results = tuple[list, list]
# A function with a border: of float tensors.
Function = Callable[..., Results]


def call(
    function: Function, tensors: Sequence, *, again: Function | None = None
) -> Results:
    """Calls a function whose gradient is scaled inside and true outside.

    What enters backwards is brought to order one by a power of two that is
    found anew in each backward pass, and divided out where gradients leave:
    of tensors and of the variables that the function reads. Its own gradient
    has such a border as well; in eager mode it runs the function again, once
    for each order.

    Args:
        function: Takes tensors; returns results, and losses that were added
            on the way, whose gradients are often far larger.
        tensors: Its arguments, float tensors.
        again: What runs the function again, without a trace of its own.
            Defaults to the function.

    Returns:
        What the function returns.
    """
    # Eager ones become part of the graph, of which gradients may be asked.
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    # Where no tape is around, a gradient can be asked of a graph alone.
    run = _taped if gradients.is_recorded() else _untaped
    (tape, results), variables = gradients.and_variables(run, function, tensors)
    border = _Border(again or function, tensors, variables, results)
    return border.results([] if tape is None else [tape])


class _Border:
    """What stands around one run of a function."""

    def __init__(
        self,
        again: Function,
        tensors: Sequence,
        variables: Sequence,
        results: Results,
    ) -> None:
        self._again = again
        self._tensors, self._variables = list(tensors), list(variables)
        self._results = results
        self._factor = power.placing()
        self._trace = compilation.trace()

    def results(self, tapes: list[tf.GradientTape]) -> Results:
        """Returns results whose gradients have the border.

        Args:
            tapes: The one that recorded the run, if one did.
        """
        of_results, of_losses = self._results
        made = gradients.replaced(
            [*of_results, *of_losses],
            self._tensors,
            self._variables,
            by_tape=functools.partial(self._gradient, tapes),
            # A graph that held a tape would live for good.
            by_graph=functools.partial(self._gradient, []),
        )
        return made[: len(of_results)], made[len(of_results) :]

    def _gradient(self, tapes: list, *upstream: Any) -> list:
        count = len(self._results[0])
        by = power.of(upstream[:count], upstream[count:], self._factor)
        scaled = [_times(by, gradient) for gradient in upstream]
        inside = self._inside(tapes, scaled)
        kept = [n for n, g in enumerate(inside) if g is not None]
        values = [_values(inside[n]) for n in kept]
        # In another graph, that of a nested `tf.function`'s gradient, the
        # results of this one cannot be differentiated once more.
        if gradients.is_recorded() and compilation.trace() == self._trace:
            pull = functools.partial(self._pull, kept)
            given = [*self._tensors, *scaled]
            border = _Border(pull, given, self._variables, (values, []))
            values, _ = border.results([])
        down = 1.0 / by
        for n, dense in zip(kept, values, strict=True):
            inside[n] = _as_before(inside[n], _times(down, dense))
        return inside

    def _inside(self, tapes: list, scaled: Sequence) -> list:
        """Returns the gradients of the tensors, then of the variables."""
        is_eager = self._trace == compilation.EAGER
        if tapes:
            # In a graph it is asked once, and gone.
            tape = tapes[0] if is_eager else tapes.pop()
            return self._asked(tape, self._results, self._tensors, scaled)
        if is_eager:
            tape, results = _taped(self._again, self._tensors)
            return self._asked(tape, results, self._tensors, scaled)
        flat = [*self._results[0], *self._results[1]]
        return gradients.of_graph(flat, self._tensors, self._variables, scaled)

    def _asked(
        self,
        tape: tf.GradientTape,
        results: Results,
        tensors: Sequence,
        scaled: Sequence,
    ) -> list:
        sources = [*tensors, *self._variables]
        asked: list = tape.gradient([*results[0], *results[1]], sources, scaled)
        return asked

    def _pull(self, kept: Sequence, *given: Any) -> Results:
        """Computes the gradients inside anew: of tensors and what enters."""
        count = len(self._tensors)
        tensors, scaled = given[:count], given[count:]
        tape, results = _taped(self._again, tensors)
        inside = self._asked(tape, results, tensors, scaled)
        return [_values(inside[n]) for n in kept], []


def _taped(
    function: Function, tensors: Sequence
) -> tuple[tf.GradientTape, Results]:
    # In eager mode a tape around it may be asked more than once. In a graph a
    # persistent one keeps it alive for good.
    with tf.GradientTape(persistent=tf.executing_eagerly()) as tape:
        tape.watch(list(tensors))
        results = function(*tensors)
    return tape, results


def _untaped(function: Function, tensors: Sequence) -> tuple[None, Results]:
    return None, function(*tensors)


def _values(gradient: Any) -> Any:
    """Returns a gradient's numbers, of one by rows those of its rows."""
    return getattr(gradient, "values", gradient)


def _as_before(gradient: Any, values: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def _times(factor: Any, tensor: Any) -> Any:
    # In float32, which holds every factor.
    if tensor.dtype == tf.float32:
        # Quick to trace, for hundreds of gradients.
        return tf.raw_ops.Mul(x=tensor, y=factor)
    wide = tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor
    return tf.cast(wide * tf.cast(factor, wide.dtype), tensor.dtype)
