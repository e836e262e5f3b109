"""Encodes float32 numbers in 8 bits, in blocks that share a scale.

A code is a small float without special values, so its error is relative: at
most 1/16 with three bits of mantissa, if rounded to nearest. The scale of a
block is the power of two below its largest number. Numbers that do not change
keep their codes, even if the largest number moves. XLA's time for a step grows
faster than its operations, so there are few.
"""

import math
from typing import Any, NamedTuple

from keras import ops

from tfmix._keras import kernels
from tfmix.optimizers import bits

# A block is a row, or its fewest last axes with this many numbers.
BLOCK = 256
# With this noise, one half, numbers are rounded to nearest.
NEAREST = -(2**31)
_INFINITY = 255 << 23
_int = bits.signed


class Code(NamedTuple):
    """An 8-bit format for the numbers of a block.

    Attributes:
        signed: Bool. In a format without a sign, positive numbers never become
            0: dividing by a second moment of 0 would make a huge step.
        octaves: Integer, the number of powers of two in the range.
    """

    signed: bool
    octaves: int

    @property
    def dtype(self) -> str:
        """The dtype of codes."""
        return "int8" if self.signed else "uint8"

    @property
    def steps(self) -> int:
        """The number of codes from one power of two to the next."""
        return (128 if self.signed else 256) // self.octaves

    @property
    def dropped(self) -> int:
        """The number of mantissa bits of float32 that a code drops."""
        return 24 - self.steps.bit_length()

    @property
    def base(self) -> int:
        """The remaining float32 bits of the code 0."""
        # The largest number of a block is between 1 and 2. The octave above is
        # for numbers that are rounded up.
        return self.steps * (127 + 2 - self.octaves)


# The smallest mean is 3e-5 of the largest number in its block. The smallest
# second moment is 5e-10, and its root is 2e-5. Lion uses only the sign of its
# momentum, so its range counts more than its digits: 2e-19, with one bit of
# mantissa.
SIGNED, UNSIGNED, SIGNS = Code(True, 16), Code(False, 32), Code(True, 64)


def encode(value: Any, code: Code, noise: Any) -> tuple[Any, Any]:
    """Returns the codes of a float32 tensor, and the scales of its blocks.

    Args:
        value: Tensor of at least two axes.
        code: The 8-bit format.
        noise: Int32 tensor, as `noise.noise` draws it for stochastic
            rounding, or `NEAREST`; or a function that returns one for an
            offset of the seed.

    Returns:
        A tensor of the code's dtype and the shape of `value`, and a float32
        tensor of the shape `blocks_shape` with the scale of each block. No
        number of a block that holds a NaN or an infinity is decoded as finite.
        Numbers above 2**127 may become infinite.
    """
    # Without sign and mantissa, a number is the power of two below its size.
    octaves = kernels.bitcast(value, "int32")
    octaves = ops.bitwise_and(octaves, _int(_INFINITY))
    scales = _largest(octaves)
    if callable(noise):
        # The offset is always 0, a sign bit, but compilers do not know it.
        # Otherwise XLA would compute the noise of two tensors once, and
        # store it, which takes as much memory as float32 state.
        noise = noise(ops.right_shift(octaves, _int(31)))
    noise = bits.upper(ops.cast(noise, "int32"), 32 - code.dropped)
    # These factors move a block's largest number between 2 and 4. Reciprocals
    # of scales would move it between 1 and 2, but some would be subnormal.
    factors = kernels.bitcast(_int(_INFINITY) - scales, "float32")
    scaled = ops.multiply(value, _spread(factors, value.shape))
    sizes = ops.absolute(scaled)
    words = kernels.bitcast(sizes, "int32")
    zero, unit = code.base + code.steps, 2**code.dropped
    if code.signed:
        # Between 0 and the smallest number, words are linear: the distance is
        # the chance.
        smallest = 2.0 ** (3 - code.octaves) * (1 + 1 / code.steps)
        line = ops.minimum(ops.multiply(sizes, unit / smallest), unit)
        least = ops.cast(line, "int32") + _int(zero * unit)
    else:
        least = _int((zero + 1) * unit)
    words = ops.maximum(words, least) + noise
    codes = ops.right_shift(words, _int(code.dropped)) - _int(zero)
    # These factors are 0 for 0, whatever its words are.
    signs = ops.sign(value) if code.signed else ops.greater(value, 0.0)
    codes = ops.cast(codes * ops.cast(signs, "int32"), code.dtype)
    return codes, kernels.bitcast(scales, "float32")


def decode(codes: Any, scales: Any, code: Code) -> Any:
    """Returns the rounded float32 tensor of codes from `encode`."""
    codes = ops.cast(codes, "int32")
    words = ops.absolute(codes) if code.signed else codes
    words = ops.left_shift(words + _int(code.base), _int(code.dropped))
    signs = ops.cast(ops.sign(codes), "float32")
    factors = ops.multiply(signs, _spread(scales, codes.shape))
    return ops.multiply(kernels.bitcast(words, "float32"), factors)


def blocks_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales of a tensor's blocks."""
    # Whole axes keep the layout that a compiler chose. A TPU would copy a
    # tensor to cut its last axis, and often it stores another axis as the last.
    axis = len(shape) - 1
    while axis > 1 and math.prod(shape[axis:]) < BLOCK:
        axis -= 1
    return tuple(shape[:axis])


def _largest(words: Any) -> Any:
    """Returns the largest integer of each block."""
    # The bits of positive floats have the same order. Comparing integers lets a
    # CPU compare many at once.
    first = len(blocks_shape(words.shape))
    return ops.max(words, axis=tuple(range(first, len(words.shape))))


def _spread(scales: Any, shape: tuple[int, ...]) -> Any:
    """Returns a tensor that broadcasts to each number's scale."""
    ones = [1] * (len(shape) - len(scales.shape))
    return ops.reshape(scales, (*scales.shape, *ones))
