"""Numbers that decide which way a value is rounded stochastically.

They take no generator: each is computed where it is used, in the kernel that
rounds, and is the same in eager code, in graphs, under XLA and on each replica.
"""

import math
from typing import Any

from keras import ops

from tfmix.optimizers import bits

# 2**32 divided by the golden ratio, and odd.
_GOLDEN = 0x9E3779B9
# What tells the streams of a step apart, and a place from the next.
_STREAM, _PLACE = 0x3C6EF372, 0x9E3779B1


def noise(shape: tuple[int, ...], seed: Any, stream: int, step: Any) -> Any:
    """Returns int32 tensors whose bits, highest first, are a number in [0, 1).

    An element's number of the first step is a hash of its place; each step adds
    the golden ratio, modulo 1. In any row of steps such numbers lie more
    evenly than random ones (Knuth, The Art of Computer Programming 3, 6.4), so
    what is rounded again and again strays by about one rounding, not by the
    root of the number of steps.

    Args:
        shape: Shape of the result.
        seed: Int32 scalar.
        stream: Integer, another for each use within a step. What is shared
            would be computed once and kept, as large as the tensor in float32.
        step: Int32 scalar, the number of the step.
    """
    places = ops.reshape(ops.arange(math.prod(shape), dtype="int32"), shape)
    places = places * bits.signed(_PLACE) + bits.signed(stream * _STREAM)
    # The product last: of the step alone it would be a kernel of its own.
    return (_mixed(places + seed) + step) * bits.signed(_GOLDEN)


def _mixed(words: Any) -> Any:
    """Scatters the bits of int32, as MurmurHash3 does at its end."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = ops.bitwise_xor(words, bits.upper(words, shift))
        words = words * bits.signed(factor)
    return ops.bitwise_xor(words, bits.upper(words, 16))
