"""The two gates of a model's call, under TensorFlow.

Both are one operation on the caller's tape, an identity from the results to the
tensors and variables that the call has read. Its gradient multiplies by a power
of two, forms the gradients of what lies between the gates, and divides. So it
does not matter how the call has read a variable: a nested `tf.function` and a
recomputed layer give the gradient to the variable itself, where no identity of
ours could be.

What lies between the gates ran once, recorded by a tape of the call. The tape
also records how it forms gradients, if anybody may differentiate these. They
pass two such gates, too.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfmix._keras import context, tapes
from tfmix.gradient_scaling import power
from tfmix.ops import tensorflow_products, tensors
from tfmix.step import finite

# The product of this and a dtype's largest number overflows.
_LARGE = 2.0**64


class Gates:
    """The gates of one call.

    Args:
        place: Where gradients lie in float16's range: a number or a scalar.
        overwritten: The `id`s of tensors and variables whose gradient is their
            next value, which passes no gate.
    """

    def __init__(self, place: Any, overwritten: Collection[int]) -> None:
        self._place, self._overwritten = place, overwritten
        self._tensors: list = []
        self._watcher = tapes.watcher()
        # A graph holds its own gradients. Inside a second tape, TensorFlow
        # would differentiate a loop twice, for which it keeps and adds up more.
        is_taped = tf.executing_eagerly() and tapes.is_recorded()
        self._tape = tf.GradientTape(persistent=True) if is_taped else None

    def enter(self, values: Sequence) -> list:
        """Returns the tensors for the code inside, in the same order."""
        # Eager tensors become part of the graph, so that it has their
        # gradients.
        inside = [*map(tf.convert_to_tensor, values)]
        self._tensors = [*{id(x): x for x in inside}.values()]
        return inside

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Runs a block between the gates."""
        watched = [*filter(tapes.reach, self._tensors)]
        with (
            self._watcher,
            context.holding(gates=tapes.function()),
            _recording(self._tape, watched),
        ):
            yield

    def leave(self, results: Sequence, losses: Sequence) -> tuple[list, list]:
        """Returns the float tensors of a call for the code outside.

        Args:
            results: The tensors.
            losses: Losses that were added inside. Their gradients are often far
                larger than others, so they only count in the sum.
        """
        made = _between(
            [*results, *losses],
            len(results),
            self._tensors,
            self._watcher.watched_variables(),
            self._place,
            self._tape,
            self._overwritten,
        )
        return made[: len(results)], made[len(results) :]


@contextlib.contextmanager
def _recording(
    tape: tf.GradientTape | None, watched: Sequence
) -> Iterator[None]:
    """Records a block by a tape, if there is one."""
    if tape is None:
        yield
        return
    with tape:
        tape.watch(watched)
        yield


def _between(
    results: Sequence,
    count: int,
    tensors: Sequence,
    variables: Sequence,
    place: Any,
    tape: tf.GradientTape | None,
    overwritten: Collection[int] = (),
) -> list:
    """Returns results, whose gradients pass the gates.

    Args:
        results: Float tensors.
        count: The number of those that count in the maximum; others are losses.
        tensors: The tensors that they were computed from.
        variables: The variables that were read for them.
        place: A factor of the power of two.
        tape: The tape that recorded it, `None` in a graph.
        overwritten: The `id`s of tensors and variables whose gradient leaves as
            it is.
    """
    handles, trace = tapes.handles(variables), context.trace()
    passes = [id(x) not in overwritten for x in (*tensors, *variables)]

    def gradient(is_asked: Sequence, *upstream: Any) -> list:
        """Returns the gradients of the tensors, then of the variables."""
        # A `tf.gather` of a result sends rows.
        upstream = tuple(map(tf.convert_to_tensor, upstream))
        # The rules are for the code of models.
        with context.holding(rules=context.NO_RULES):
            by = power.of(upstream[:count], upstream[count:], place)
            scaled = [_times(by.up, each) for each in upstream]
        # In another graph, such as that of a nested `tf.function`'s gradient,
        # the results of this one cannot be differentiated again.
        again = tapes.is_recorded() and context.trace() == trace
        sources = [*itertools.compress(tensors, is_asked), *handles]
        with (
            # A recomputed layer calls users' functions now.
            context.holding(power=by, gates=tapes.function()),
            _recording(tape if again else None, scaled),
        ):
            if tape is None:
                found = tapes.of_graph(results, sources, scaled, tensors)
            else:
                found = tapes.of_tape(tape, results, sources, scaled)
        rest = iter(found)
        inside = [next(rest) if one else None for one in is_asked] + [*rest]
        kept = [n for n, g in enumerate(inside) if g is not None and passes[n]]
        values = [finite.values(inside[n]) for n in kept]
        if again:
            known = [*tensors, *scaled]
            values = _between(
                values, len(values), known, variables, place, tape
            )
        # Gradients of the tensors come first. They need not show why they are
        # not finite, because no optimizer gets them.
        of_tensors = sum(n < len(tensors) for n in kept)
        says_why = [False] * of_tensors
        says_why += finite.keep_overflow_visible(values[of_tensors:])
        with context.holding(rules=context.NO_RULES):
            true = _unscaled(by.down, values, says_why)
        for n, value in zip(kept, true, strict=True):
            inside[n] = finite.with_values(inside[n], value)
        return inside

    # A loop would compute a gradient that nobody gets in every step.
    is_asked = [*map(tapes.reach, tensors)]
    every = [True] * len(is_asked)
    return tapes.replaced(
        results,
        tensors,
        variables,
        by_tape=functools.partial(gradient, is_asked),
        by_graph=functools.partial(gradient, every),
    )


def _unscaled(down: Any, gradients: Sequence, says_why: Sequence) -> list:
    """Divides gradients.

    Small ones that show why they are not finite leave together where each
    operation is a kernel.

    Args:
        down: The factor; NaN if an incoming gradient was not finite.
        gradients: Float tensors.
        says_why: Whether each shows that.
    """
    lost = functools.cache(functools.partial(_lost, down))
    true, together = list(gradients), []
    joins = tf.executing_eagerly() or context.by_gpu_kernels()
    noted = [tensors.note(x, tensorflow_products.PARTS) for x in gradients]
    for n, parts in enumerate(noted):
        # A factor is the power of two that is left to multiply.
        tensor, factor = parts or (gradients[n], None)
        if joins and says_why[n] and _may_join(tensor, factor):
            together.append((n, tensor, factor or 1.0))
            continue
        by = down if factor is None else down * factor
        true[n] = _times(by, tensor, lost if says_why[n] else None)
    if together:
        numbers, values, factors = zip(*together, strict=True)
        shapes = [value.shape for value in values]
        sizes = np.array([shape.num_elements() for shape in shapes])
        flat = tf.concat([_reshaped(x, [-1]) for x in values], 0)
        if set(factors) != {1.0}:
            down *= np.repeat(np.array(factors, "float32"), sizes)
        parts = tf.raw_ops.SplitV(
            value=_saying_why(down, flat, lost),
            size_splits=sizes,
            axis=np.int32(0),
            num_split=len(sizes),
        )
        for n, part, shape in zip(numbers, parts, shapes, strict=True):
            true[n] = _reshaped(part, shape)
    return true


def _reshaped(tensor: Any, shape: Any) -> Any:
    is_vector = len(shape) == len(tensor.shape) == 1
    return tensor if is_vector else tf.reshape(tensor, shape)


def _may_join(tensor: Any, factor: Any) -> bool:
    return (
        tensor.dtype == tf.float32
        and (factor is None or isinstance(factor, float))
        and finite.is_small(tensor)
    )


def _saying_why(down: Any, tensor: Any, lost: Callable) -> Any:
    """Divides a gradient; what overflowed inside becomes infinite."""
    real = tf.math.real(tensor) if tensor.dtype.is_complex else tensor
    fine, select = tf.raw_ops.IsFinite(x=real), tf.raw_ops.SelectV2
    largest, by = lost(tensor.dtype)
    if by is None:
        product = tf.raw_ops.Mul(x=tensor, y=down)
        return select(condition=fine, t=product, e=largest)
    safe = select(condition=fine, t=tensor, e=largest)
    factor = select(condition=fine, t=down, e=by)
    return tf.raw_ops.Mul(x=safe, y=factor)


def _lost(down: Any, dtype: tf.DType) -> tuple[Any, Any]:
    """Returns what stands for an overflow, and its factor.

    The product is infinity, or NaN as `down` is.
    """
    if isinstance(down, float):
        # No operation makes this infinity.
        return tf.constant(down + math.inf, dtype), None
    if context.by_xla():
        # XLA joins one selection with other kernels. Nothing that looks for
        # infinities looks into its program.
        return tensors.cast(tf.raw_ops.AddV2(x=down, y=math.inf), dtype), None
    large = down - down + _LARGE
    return tf.constant(dtype.real_dtype.max, dtype), tensors.cast(large, dtype)


def _times(factor: Any, tensor: Any, lost: Callable | None = None) -> Any:
    """Multiplies a tensor; `_saying_why` if it is told what is `lost`."""
    dtype = tensor.dtype
    if dtype.size < 4:
        # Float32 holds every factor.
        wide = tensors.cast(tensor, tf.float32)
        return tensors.cast(_times(factor, wide, lost), dtype)
    # A number has no dtype.
    if dtype != tf.float32 and not isinstance(factor, float):
        factor = tensors.cast(factor, dtype)
    if lost is not None:
        return _saying_why(factor, tensor, lost)
    return tf.raw_ops.Mul(x=tensor, y=factor)
