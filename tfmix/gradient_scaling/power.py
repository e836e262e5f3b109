"""The power of two that scales gradients inside a model."""

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfmix._keras import kernels
from tfmix.ops import tensors

_of_tensors: Any
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def _of_two(op: Callable) -> Callable:
        return lambda x, y: op(x=x, y=y)

    _raw = tf.raw_ops
    # These have the names and the order of `jax.numpy`. They take tensors of
    # one dtype, and Python numbers. In eager mode the ops of Keras and
    # TensorFlow first convert their arguments, which takes several times as
    # long as the op.
    _of_tensors = types.SimpleNamespace(
        abs=tf.abs,
        sum=tf.reduce_sum,
        # That of no numbers is -infinity.
        max=lambda x, initial: tf.reduce_max(x),
        where=lambda a, x, y: _raw.SelectV2(condition=a, t=x, e=y),
        add=_of_two(_raw.AddV2),
        subtract=_of_two(_raw.Sub),
        divide=_of_two(_raw.RealDiv),
        maximum=_of_two(_raw.Maximum),
        minimum=_of_two(_raw.Minimum),
        greater=_of_two(_raw.Greater),
        bitwise_and=_of_two(_raw.BitwiseAnd),
    )
else:
    from jax import numpy as jnp

    _of_tensors = jnp

# Float32 holds this power of two and its reciprocal as normal numbers.
_HIGHEST = 2.0**100
_EXPONENT = 0x7F800000  # the bits of a positive float32 number's exponent
# Limits the sum of the incoming gradients. A bias gets the sum of all that
# reaches its layer, and a kernel gets that sum times its inputs. Float16 ends
# at 2^16, so either may still grow by 2^4.
_LARGEST_SUM = 2.0**12
# In a high place gradients of real networks reach 2^14 or less from here.
_LARGEST = 2.0**8
# A model whose results are numbers without features, such as losses, may have
# a mean over pixels inside, which divides their gradients.
_LARGEST_SUM_OF_NUMBERS = 2.0**15


class Power(NamedTuple):
    """The factors for gradients that enter a model, and that leave it.

    Attributes:
        up: Float32 scalar, or a number in TensorFlow's eager mode: a power of
            two, also if a gradient is not finite.
        down: Its reciprocal; NaN if a gradient that enters is not finite. No
            other step makes a NaN.
    """

    up: Any
    down: Any


@np.errstate(invalid="ignore")
def of(gradients: Sequence, losses: Sequence, place: Any) -> Power:
    """Returns the power of two that brings gradients to a place.

    Scaled by it, the largest number lies in [1, 2) times `place`. It lies
    lower if the sum of the gradients would leave float16 too little room.

    Args:
        gradients: Float tensors of any shapes, one per result.
        losses: The same for losses that were added inside. They only count in
            the sum, because they are often far larger than the others.
        place: Float or float32 scalar tensor. A lower one leaves more room for
            gradients that grow inside, a higher one for those that shrink.

    Returns:
        The power, which is 1 if all are zero.

    Examples:
        >>> float(of([keras.ops.array([0.0, -3e-6])], [], 1.0).up) * 3e-6
        1.572864
    """
    ops = _of_tensors
    sizes = [tensors.cast(ops.abs(x), "float32") for x in (*gradients, *losses)]
    total = functools.reduce(ops.add, map(ops.sum, sizes))
    # There may be no rows.
    each = [ops.max(size, initial=0.0) for size in sizes[: len(gradients)]]
    if hasattr(total, "numpy"):
        # In TensorFlow's eager mode each of a dozen operations would take as
        # long as a copy to the host.
        total, place, *each = map(float, (total, place, *each))
        ops = np
    of_sum, highest = ops.divide(total, _LARGEST_SUM), _LARGEST
    reaches = functools.reduce(ops.maximum, each, of_sum)
    if all(x.ndim in (0, 1) for x in gradients):
        highest = _LARGEST_SUM_OF_NUMBERS
        of_sum = ops.divide(total, highest)
    reaches = ops.divide(reaches, ops.minimum(place, highest))
    reaches = ops.maximum(reaches, of_sum)
    reaches = ops.where(ops.greater(reaches, 0.0), reaches, 1.0)
    reaches = ops.minimum(ops.maximum(reaches, 1 / _HIGHEST), _HIGHEST)
    up = ops.divide(1.0, _power_below(reaches))
    # The difference is 0, or NaN; XLA's maximum on a CPU may lose a NaN. The
    # division comes last: XLA computes it once, but repeats a selection in each
    # kernel.
    bad = ops.subtract(total, total)
    power = Power(up, ops.divide(1.0, ops.add(up, bad)))
    return Power(*map(float, power)) if ops is np else power


def _power_below(number: Any) -> Any:
    """Returns the largest power of two up to a positive normal number."""
    if isinstance(number, float):
        return math.ldexp(1.0, math.frexp(number)[1] - 1)
    word = kernels.bitcast(number, "int32")
    exponent = _of_tensors.bitwise_and(word, _EXPONENT)
    return kernels.bitcast(exponent, "float32")
