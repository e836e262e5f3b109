"""The power of two that gradients are scaled by inside a border."""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from keras import ops

from tfmix._keras import compilation, context_values

# Float32 holds this power of two and its reciprocal as normal numbers.
_HIGHEST = 100
_BIAS, _MANTISSA = 127, 23
# What a gradient may add up to where it enters. A bias gets the sum of all
# that reaches its layer, and a kernel that sum times its inputs: below this
# 4 bits are left for these, however many pixels or tokens there are.
_LARGEST_SUM = 2.0**12
# Without XLA to join them with others, operations that only say why a gradient
# is not finite run for gradients of so many numbers at most.
_SMALL = 4096


class Power(NamedTuple):
    """What gradients are multiplied by inside a border, and outside again.

    Attributes:
        up: Float32 scalar, a power of two.
        down: Its reciprocal; NaN if a gradient that enters is not finite.
    """

    up: Any
    down: Any


def placing() -> Any:
    """Returns where gradients are placed just now: a factor, 1.0 by default."""
    factor = context_values.block.get().placing
    return 1.0 if factor is None else factor


def is_placed() -> bool:
    """Says whether a rule places the gradients of what is called just now."""
    return context_values.block.get().placing is not None


def placed(factor: Any) -> contextlib.AbstractContextManager[None]:
    """Places the gradients of what is called in a block elsewhere.

    Args:
        factor: Float or float32 scalar tensor, a power of two: below 1 more of
            the format is left for what grows inside, above 1 for what shrinks.
    """
    return context_values.holding(placing=factor)


def of(gradients: Sequence, losses: Sequence, factor: Any) -> Power:
    """Returns the power of two that brings gradients to order one.

    Scaled by it, the largest number of all lies in [1, 2), or lower where
    their sum would leave float16 too little room, times `factor`.

    Args:
        gradients: Float tensors of any shapes, by results.
        losses: The same, by losses that were added inside: these count in
            the sum alone, for they are often far larger than the others.
        factor: As for `placed`.

    Returns:
        The power, which is `factor` if all are zero or one is not finite.

    Examples:
        >>> float(of([ops.array([0.0, -3e-6])], [], 1.0).up) * 3e-6
        1.572864
    """
    sizes = [ops.cast(ops.abs(x), "float32") for x in (*gradients, *losses)]
    total = functools.reduce(ops.add, map(ops.sum, sizes))
    # There may be no rows.
    largest = [ops.max(size, initial=0) for size in sizes[: len(gradients)]]
    reaches = functools.reduce(ops.maximum, largest or [ops.zeros(())])
    reaches = ops.maximum(reaches, total / _LARGEST_SUM)
    word = compilation.bitcast(reaches, "int32")
    exponent = _BIAS - ops.right_shift(word, _MANTISSA)
    # XLA's maximum on a CPU may lose a NaN, a sum keeps it.
    is_finite = ops.isfinite(total)
    usable = ops.logical_and(reaches > 0, is_finite)
    exponent = ops.where(usable, exponent, 0)
    exponent = ops.clip(exponent, -_HIGHEST, _HIGHEST)
    power = ops.left_shift(exponent + _BIAS, _MANTISSA)
    up = compilation.bitcast(power, "float32") * factor
    # Last a division: XLA computes it once, and a choice anew in each kernel.
    return Power(up, 1.0 / ops.where(is_finite, up, float("nan")))


def say_why(gradients: Sequence) -> list[bool]:
    """Says which gradients, not being finite, say why as they leave a border.

    A border returns NaN for all gradients if what entered was not finite. What
    overflows inside of it leaves as infinity, or, of the other gradients, as it
    was computed. TensorFlow's own kernels would read each gradient once more.

    Args:
        gradients: Those of a model's variables, at least one.
    """
    if compilation.by_xla():
        return [True] * len(gradients)
    shapes = [tuple(gradient.shape) for gradient in gradients]
    small = [None in s or math.prod(s) <= _SMALL for s in shapes]
    return small if any(small) else [True] * len(gradients)


def blames_data(gradients: Sequence) -> Any:
    """Says whether gradients are not finite because what entered was not.

    One number of a gradient tells, if that says why.

    Args:
        gradients: Gradients of a model with a border; `None` where there is
            none.

    Returns:
        Boolean scalar tensor; `False` where there is no gradient.
    """
    values = [getattr(g, "values", g) for g in gradients if g is not None]
    values = [value for value in values if 0 not in tuple(value.shape)]
    values = [
        value
        for value, says in zip(values, say_why(values), strict=True)
        if says
    ]
    if not values:
        return False
    # The first variable gets gradients from all that comes after it. What
    # makes the last may be the one head whose loss is not finite. Scalars fuse
    # with what moves the rule: no kernel more. Made flat first, a TPU would
    # copy the whole gradient.
    first, last = (
        ops.isnan(ops.reshape(value[(slice(1),) * len(value.shape)], ()))
        for value in (values[0], values[-1])
    )
    return ops.logical_or(first, last)
