"""Encodes float32 numbers in 8 bits, in blocks that share a scale.

A code is a small float without special values, so its error is relative: at
most 1/16 with three bits of mantissa, if rounded to nearest. The scale of a
block is the power of two above its largest number. Numbers that do not change
keep their codes, even if the largest number moves.
"""

import math
from typing import Any, NamedTuple

from keras import ops

from tfmix._keras import compilation
from tfmix.optimizers import bits

# This many numbers, next to each other in memory, share a scale.
BLOCK = 256
# With this noise, one half, numbers are rounded to nearest.
NEAREST = -(2**31)
_ONE, _LARGEST, _INFINITY = 127 << 23, 254 << 23, 255 << 23
_SMALLEST = 1 << 23
# A CPU compares this many numbers at a time.
_LANES = 32
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
        return (_ONE >> self.dropped) + self.steps * (1 - self.octaves)


# The smallest mean is 3e-5 of the largest number in its block. The smallest
# second moment is 5e-10, and its root is 2e-5. Lion uses only the sign of its
# momentum, so its range counts more than its digits: 2e-19, with one bit of
# mantissa.
SIGNED, UNSIGNED, SIGNS = Code(True, 16), Code(False, 32), Code(True, 64)


def encode(value: Any, code: Code, noise: Any) -> tuple[Any, Any]:
    """Returns the codes of a float32 tensor, and the sizes of its blocks.

    Args:
        value: Tensor of any shape.
        code: The 8-bit format.
        noise: Int32 tensor, as `noise.noise` draws it for stochastic
            rounding, or `NEAREST`; or a function that returns one for an
            offset of the seed.

    Returns:
        A uint8 tensor of the shape of `value`, and a float32 vector with the
        largest magnitude of each `BLOCK` elements. A block that holds a NaN
        or an infinity is decoded as NaN.
    """
    sizes = ops.absolute(value)
    largest = _largest(sizes)
    if callable(noise):
        # The offset is always 0, but compilers cannot know it: it is the sign
        # bit of a size. Otherwise XLA would compute the noise of two tensors
        # once, and store it, which takes as much memory as float32 state.
        first = compilation.bitcast(largest[:1], "int32")
        noise = noise(ops.right_shift(first, _int(31))[0])
    noise = bits.upper(ops.cast(noise, "int32"), 32 - code.dropped)
    # Subtracting exponents divides, where XLA would store a real quotient.
    scales = compilation.bitcast(_scales(largest, value.shape), "int32")
    words = compilation.bitcast(sizes, "int32")
    # Zeros and subnormals have no exponent to subtract from.
    is_normal = ops.greater_equal(words, _int(_SMALLEST))
    words = ops.where(is_normal, words - (scales - _int(_ONE)), _int(0))
    scaled = compilation.bitcast(ops.maximum(words, _int(0)), "float32")
    codes = ops.right_shift(words + noise, _int(code.dropped)) - _int(code.base)
    smallest = 2.0 ** (1 - code.octaves) * (1 + 1 / code.steps)
    small = _int(1)
    if code.signed:
        # Between 0 and the smallest number, the distance is the chance.
        chance = ops.cast(noise, "float32") * (2.0**-code.dropped * smallest)
        small = ops.cast(ops.greater(scaled + chance, smallest), "int32")
    codes = ops.where(ops.less(scaled, smallest), small, codes)
    codes = ops.minimum(codes, _int(code.steps * code.octaves - 1))
    codes = ops.cast(codes, "uint8")
    # The last operation takes two tensors. If it were a cast, XLA would compute
    # the codes again in each kernel that reads them.
    if code.signed:
        sign = ops.right_shift(compilation.bitcast(value, "int32"), _int(24))
        sign = ops.cast(ops.bitwise_and(sign, _int(128)), "uint8")
        return ops.bitwise_or(codes, sign), largest
    zero = ops.cast(0, "uint8")
    return ops.where(ops.greater(sizes, 0.0), codes, zero), largest


def decode(codes: Any, largest: Any, code: Code) -> Any:
    """Returns the rounded float32 tensor of codes from `encode`."""
    codes = ops.cast(codes, "int32")
    size = ops.bitwise_and(codes, _int(127)) if code.signed else codes
    word = ops.left_shift(size + _int(code.base), _int(code.dropped))
    value = compilation.bitcast(word, "float32")
    value = ops.where(ops.equal(size, _int(0)), 0.0, value)
    if code.signed:
        value = ops.where(ops.greater(codes, _int(127)), -value, value)
    return ops.multiply(value, _scales(largest, codes.shape))


def blocks(shape: tuple[int, ...]) -> int:
    """Returns the number of blocks of a tensor."""
    return -(-math.prod(shape) // BLOCK)


def _largest(sizes: Any) -> Any:
    """Returns the largest number of each block."""
    shape = _block_shape(tuple(sizes.shape))
    if shape is None:
        shape, count = (-1, BLOCK), math.prod(sizes.shape)
        padding = blocks(sizes.shape) * BLOCK - count
        sizes = ops.pad(ops.reshape(sizes, (count,)), [(0, padding)])
    # The bits of positive floats have the same order. Comparing integers, and
    # along an axis before the last one first, lets a CPU compare many at once.
    words = compilation.bitcast(sizes, "int32")
    words = ops.reshape(words, (*shape[:-1], BLOCK // _LANES, _LANES))
    words = ops.max(ops.max(words, axis=-2), axis=-1)
    return compilation.bitcast(ops.reshape(words, (-1,)), "float32")


def _block_shape(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns a shape whose last axis is a block, if blocks fill the tensor.

    Only the last axes are reshaped. If one of the others is sharded, no device
    has to fetch elements of other devices.
    """
    for axis in reversed(range(len(shape))):
        count, rest = divmod(math.prod(shape[axis:]), BLOCK)
        if not rest:
            return (*shape[:axis], count, BLOCK)
    return None


def _scales(largest: Any, shape: tuple[int, ...]) -> Any:
    """Returns each element's scale, the power of two above its block."""
    # The scales are computed where they are used. Storing them would need
    # another kernel on a GPU.
    spread = ops.broadcast_to(
        ops.expand_dims(largest, 1), (blocks(shape), BLOCK)
    )
    flat = ops.reshape(spread, (-1,))[: math.prod(shape)]
    words = compilation.bitcast(ops.reshape(flat, shape), "int32")
    finite = ops.less(words, _int(_INFINITY))
    power = ops.bitwise_and(words + _int(_SMALLEST - 1), _int(-_SMALLEST))
    power = ops.minimum(ops.maximum(power, _int(_SMALLEST)), _int(_LARGEST))
    return compilation.bitcast(
        ops.where(finite, power, _int(_INFINITY)), "float32"
    )
