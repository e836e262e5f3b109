"""Float32 numbers as 8-bit codes, in blocks that share a scale.

A code is a small float without special values, so the error is relative: at
most 1/16 with three bits of mantissa, where rounded to nearest. A block is
scaled by the power of two above its largest number: what does not change keeps
its code, also when that number moves.
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
_SMALLEST = 1 << 23
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
    """Returns the codes of a float32 tensor, and the sizes of its blocks.

    Args:
        value: Tensor of any shape.
        code: How to code.
        noise: Int32 tensor, as `noise.noise` draws it for stochastic
            rounding, or `NEAREST`; or what returns it, moved by a number.

    Returns:
        A uint8 tensor of the shape of `value`, and a float32 vector with the
        largest magnitude of each `BLOCK` elements. A block that holds a NaN
        or an infinity is decoded as NaN.
    """
    sizes = ops.absolute(value)
    largest = _largest(sizes)
    if callable(noise):
        # By 0, the sign of a size, which no compiler knows: what two tensors
        # share would be computed once and kept, as large as they in float32.
        first = compilation.bitcast(largest[:1], "int32")
        noise = noise(ops.right_shift(first, _int(31))[0])
    noise = bits.upper(ops.cast(noise, "int32"), 32 - code.dropped)
    # Divided by subtracting exponents: XLA stores a quotient for later.
    scales = compilation.bitcast(_scales(largest, value.shape), "int32")
    words = compilation.bitcast(sizes, "int32")
    # What is 0 or subnormal has no exponent to subtract from.
    is_normal = ops.greater_equal(words, _int(_SMALLEST))
    words = ops.where(is_normal, words - (scales - _int(_ONE)), _int(0))
    scaled = compilation.bitcast(ops.maximum(words, _int(0)), "float32")
    codes = ops.right_shift(words + noise, _int(code.dropped)) - _int(code.base)
    smallest = 2.0 ** (1 - code.octaves) * (1 + 1 / code.steps)
    small = _int(1)
    if code.signed:
        # Between 0 and the smallest, the chance is the distance.
        chance = ops.cast(noise, "float32") * (2.0**-code.dropped * smallest)
        small = ops.cast(ops.greater(scaled + chance, smallest), "int32")
    codes = ops.where(ops.less(scaled, smallest), small, codes)
    codes = ops.minimum(codes, _int(code.steps * code.octaves - 1))
    codes = ops.cast(codes, "uint8")
    # Last an operation on two tensors: what ends in a cast, XLA would compute
    # again in each kernel that reads the codes.
    if code.signed:
        sign = ops.right_shift(compilation.bitcast(value, "int32"), _int(24))
        sign = ops.cast(ops.bitwise_and(sign, _int(128)), "uint8")
        return ops.bitwise_or(codes, sign), largest
    zero = ops.cast(0, "uint8")
    return ops.where(ops.greater(sizes, 0.0), codes, zero), largest


def decode(codes: Any, largest: Any, code: Code) -> Any:
    """Returns the float32 tensor that `encode` was given, rounded."""
    codes = ops.cast(codes, "int32")
    size = ops.bitwise_and(codes, _int(127)) if code.signed else codes
    kept = ops.left_shift(size + _int(code.base), _int(code.dropped))
    value = compilation.bitcast(kept, "float32")
    value = ops.where(ops.equal(size, _int(0)), 0.0, value)
    if code.signed:
        value = ops.where(ops.greater(codes, _int(127)), -value, value)
    return ops.multiply(value, _scales(largest, codes.shape))


def blocks(shape: tuple[int, ...]) -> int:
    """Returns the number of blocks of a tensor."""
    return -(-math.prod(shape) // BLOCK)


def _largest(sizes: Any) -> Any:
    """Returns the largest of each block."""
    cut = _cut(tuple(sizes.shape))
    if cut is None:
        cut, count = (-1, BLOCK), math.prod(sizes.shape)
        padding = blocks(sizes.shape) * BLOCK - count
        sizes = ops.pad(ops.reshape(sizes, (count,)), [(0, padding)])
    # As integers, which lie in the same order, and over an axis before the last
    # one first: so a CPU compares many at a time.
    words = compilation.bitcast(sizes, "int32")
    words = ops.reshape(words, (*cut[:-1], BLOCK // _LANES, _LANES))
    words = ops.max(ops.max(words, axis=-2), axis=-1)
    return compilation.bitcast(ops.reshape(words, (-1,)), "float32")


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


def _scales(largest: Any, shape: tuple[int, ...]) -> Any:
    """Returns, for each element, the power of two not below its block's."""
    # Computed where it is used: stored, it would cost a GPU a kernel more.
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
