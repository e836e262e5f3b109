"""Float32 numbers as 8-bit codes, in blocks that share a scale.

A code is a small float without special values, so the error is relative: at
most 1/16 with three bits of mantissa, where rounded to nearest. A block is
scaled by the power of two above its largest number: what does not change keeps
its code, also when that number moves.

All is integer arithmetic on the bits of float32, in as few operations as can be:
a step has them for each slot of each variable, and XLA's time to compile it grows
with their number.
"""

import math
from typing import Any, NamedTuple

from keras import ops

from tfmix._keras import compilation
from tfmix.optimizers import bits

# Numbers that share a scale, next to each other in memory.
BLOCK = 256
# The noise of rounding to nearest, a half.
NEAREST = -(2**31)
_ONE, _LARGEST, _INFINITY = 127 << 23, 254 << 23, 255 << 23
_OCTAVE = 1 << 23
_MAGNITUDE = 2**31 - 1
# Numbers that a CPU compares at a time.
_LANES = 32
_int = bits.signed


class Code(NamedTuple):
    """How 8 bits stand for the numbers of a block.

    Attributes:
        signed: Bool. Without a sign, positive numbers never become 0: a second
            moment of 0 would make a step as large as the epsilon is small.
        octaves: Integer, powers of two between the largest and the smallest.
    """

    signed: bool
    octaves: int

    @property
    def steps(self) -> int:
        """Codes from one power of two to the next."""
        return (128 if self.signed else 256) // self.octaves

    @property
    def dropped(self) -> int:
        """Of float32's 23 bits of mantissa those that a code lacks."""
        return 24 - self.steps.bit_length()

    @property
    def base(self) -> int:
        """The code's zero, in the bits of float32 that a code keeps."""
        return (_ONE >> self.dropped) + self.steps * (1 - self.octaves)


# Means reach to 3e-5 of the largest of their block, second moments to 5e-10,
# whose root is 2e-5. Where only the sign of a mean moves a weight, its range
# counts more than its digits: 2e-19, with one bit of mantissa.
SIGNED, UNSIGNED, SIGNS = Code(True, 16), Code(False, 32), Code(True, 64)


def encode(value: Any, code: Code, noise: Any) -> tuple[Any, Any]:
    """Returns the codes of a float32 tensor, and the scales of its blocks.

    Args:
        value: Tensor of any shape.
        code: How to code.
        noise: Int32 tensor, as `noise.noise` draws it for stochastic
            rounding, or `NEAREST`.

    Returns:
        A uint8 tensor of the shape of `value`, and a float32 vector with a
        power of two above the magnitudes of each `BLOCK` elements. A block
        that holds a NaN or an infinity is decoded as NaN.
    """
    bits_of_value = compilation.bitcast(value, "int32")
    words = ops.bitwise_and(bits_of_value, _int(_MAGNITUDE))
    scales = _scales(words, code)
    spread = _spread(scales, value.shape)
    noise = bits.upper(ops.cast(noise, "int32"), 32 - code.dropped)
    # Divided by subtracting exponents: XLA stores a quotient for later.
    scaled = words - compilation.bitcast(spread, "int32")
    codes = ops.right_shift(scaled + noise, _int(code.dropped))
    codes = codes + _int((_ONE >> code.dropped) - code.base)
    if code.signed:
        # Between 0 and the smallest, the chance is the distance.
        smallest = 2.0 ** (1 - code.octaves) * (1 + 1 / code.steps)
        chance = ops.cast(noise, "float32") * (2.0**-code.dropped * smallest)
        small = ops.greater(ops.absolute(value), chance * spread)
        least = (1 << code.dropped) - _OCTAVE * (code.octaves - 1)
        is_small = ops.less(scaled, _int(least))
        codes = ops.where(is_small, ops.cast(small, "int32"), codes)
    else:
        codes = ops.maximum(codes, _int(1))
    codes = ops.minimum(codes, _int(code.steps * code.octaves - 1))
    codes = ops.cast(codes, "uint8")
    # Last an operation on two tensors: what ends in a cast, XLA would compute
    # again in each kernel that reads the codes.
    if code.signed:
        sign = ops.right_shift(bits_of_value, _int(24))
        sign = ops.cast(ops.bitwise_and(sign, _int(128)), "uint8")
        return ops.bitwise_or(codes, sign), scales
    zero = ops.cast(0, "uint8")
    return ops.where(ops.greater(words, _int(0)), codes, zero), scales


def decode(codes: Any, scales: Any, code: Code) -> Any:
    """Returns the float32 tensor that `encode` was given, rounded."""
    codes = ops.cast(codes, "int32")
    size = ops.bitwise_and(codes, _int(127)) if code.signed else codes
    word = ops.left_shift(size + _int(code.base), _int(code.dropped))
    if code.signed:
        sign = ops.bitwise_and(codes, _int(128))
        word = ops.bitwise_or(word, ops.left_shift(sign, _int(24)))
    value = compilation.bitcast(word, "float32")
    value = ops.where(ops.greater(size, _int(0)), value, 0.0)
    return ops.multiply(value, _spread(scales, codes.shape))


def blocks(shape: tuple[int, ...]) -> int:
    """Returns the number of blocks of a tensor."""
    return -(-math.prod(shape) // BLOCK)


def _scales(words: Any, code: Code) -> Any:
    """Returns the power of two above each block's magnitudes."""
    # Of each element, then the largest of all: what comes after a reduction
    # would be a kernel of its own, what comes before is not.
    above = ops.bitwise_and(words, _int(-_OCTAVE)) + _int(_OCTAVE)
    above = ops.minimum(above, _int(_LARGEST))
    finite = ops.less(words, _int(_INFINITY))
    powers = ops.where(finite, above, _int(_INFINITY))
    cut = _cut(tuple(words.shape))
    if cut is None:
        cut, count = (-1, BLOCK), math.prod(words.shape)
        padding = blocks(words.shape) * BLOCK - count
        powers = ops.pad(ops.reshape(powers, (count,)), [(0, padding)])
    # As integers, which lie in the same order, and over an axis before the last
    # one first: so a CPU compares many at a time.
    powers = ops.reshape(powers, (*cut[:-1], BLOCK // _LANES, _LANES))
    # With a least scale, whose smallest code is no subnormal.
    least = _OCTAVE * code.octaves
    powers = ops.max(ops.max(powers, axis=-2), axis=-1, initial=least)
    return compilation.bitcast(ops.reshape(powers, (-1,)), "float32")


def _cut(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns a shape whose last axis is a block, if blocks fill the tensor.

    The axes in front of those that make up whole blocks are kept: where one is
    sharded, no device has to fetch the others' elements.
    """
    for axis in reversed(range(len(shape))):
        count, rest = divmod(math.prod(shape[axis:]), BLOCK)
        if not rest:
            return (*shape[:axis], count, BLOCK)
    return None


def _spread(scales: Any, shape: tuple[int, ...]) -> Any:
    """Returns, for each element, the scale of its block."""
    shape = tuple(shape)
    cut = _cut(shape)
    if cut is not None:
        scales = ops.reshape(scales, (*cut[:-1], 1))
        return ops.reshape(ops.broadcast_to(scales, cut), shape)
    filled = blocks(shape), BLOCK
    flat = ops.broadcast_to(ops.expand_dims(scales, 1), filled)
    return ops.reshape(ops.reshape(flat, (-1,))[: math.prod(shape)], shape)
