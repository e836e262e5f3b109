"""Computes the random numbers of stochastic rounding.

There is no generator. The kernel that rounds a tensor also computes its random
numbers, which are the same in eager code, in graphs, under XLA and on each
replica.
"""

import math
from typing import Any

from keras import ops

from tfmix.optimizers import bits

# 2**32 divided by the golden ratio, and odd.
_GOLDEN = 0x9E3779B9
# Each stream multiplies positions by an odd number of its own.
_PLACE, _STREAM = 0x9E3779B1, 0x0BD794D6


def noise(shape: tuple[int, ...], seed: Any, stream: int, step: Any) -> Any:
    """Returns an int32 tensor whose bits are fractions, uniform in [0, 1).

    In the first step, an element's number is a hash of its position. Each step
    adds the golden ratio, modulo 1. In successive steps such numbers are
    spread more evenly than random ones (Knuth, The Art of Computer Programming
    3, 6.4). So a number that is rounded in each step drifts by about one
    rounding, not by the root of the number of steps.

    Args:
        shape: Shape of the result.
        seed: Int32 scalar.
        stream: Integer, a different one for each use within a step. XLA would
            compute shared noise once and store it, in as much memory as the
            tensor takes in float32.
        step: Int32 scalar, the number of the step.
    """
    places = ops.reshape(ops.arange(math.prod(shape), dtype="int32"), shape)
    # A seed moves the positions, and a stream multiplies them differently.
    # There is one round of mixing, because each operation costs XLA time for
    # every tensor of a model. Numbers at some distances are correlated by up to
    # 0.1, which rounding does not notice.
    words = (places + seed) * bits.signed(_PLACE + stream * _STREAM)
    words = ops.bitwise_xor(words, ops.right_shift(words, bits.signed(16)))
    # Multiplying last saves a kernel, which the product of the step would need.
    return (words + step) * bits.signed(_GOLDEN)
