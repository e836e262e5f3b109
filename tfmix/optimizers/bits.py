"""Float32 numbers taken apart into bits, the same on every backend."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from keras import ops

from tfmix._keras import compilation

# Tensors that one kernel sums, small ones and large: more of these need more
# memory in between.
_TOGETHER = 32, 8
_LARGE = 2**18


def split(value: Any) -> tuple[Any, Any]:
    """Splits float32 into a bfloat16 and the 16 bits it lacks, an int16."""
    # The upper half is rounded to nearest, ties away from zero, and the lower
    # half is what is missing, with a sign. Ties to even would not be
    # invertible: the remainder +32768 does not fit, and -32768 would stand for
    # both neighbours.
    bits = compilation.bitcast(quiet(value), "uint32")
    upper = ops.right_shift(ops.add(bits, unsigned(0x8000)), unsigned(16))
    upper = compilation.bitcast(ops.cast(upper, "uint16"), "bfloat16")
    lower = ops.cast(ops.bitwise_and(bits, unsigned(0xFFFF)), "uint16")
    return upper, compilation.bitcast(lower, "int16")


def join(upper: Any, lower: Any) -> Any:
    """Puts together, exactly, what `split` took apart."""
    bits = ops.cast(compilation.bitcast(upper, "uint16"), "uint32")
    bits = ops.left_shift(bits, unsigned(16))
    # Sign-extended and added modulo 2**32.
    rest = compilation.bitcast(ops.cast(lower, "int32"), "uint32")
    return compilation.bitcast(ops.add(bits, rest), "float32")


def refreshed(master: Any, stored: Any) -> Any:
    """Returns a float32 master where its rounding is stored, or the stored."""
    # Somebody may have assigned a 16-bit variable (`load_weights`); an
    # untouched element equals the master's rounded value exactly.
    master = ops.convert_to_tensor(master)
    stored = ops.convert_to_tensor(stored)
    rounded = ops.cast(master, stored.dtype)
    # Compared as bits: XLA may drop a rounding whose result it computes with.
    untouched = ops.equal(
        compilation.bitcast(rounded, "uint16"),
        compilation.bitcast(stored, "uint16"),
    )
    return ops.where(untouched, master, ops.cast(stored, "float32"))


def quiet(value: Any) -> Any:
    """Makes every NaN of a float32 tensor the same one."""
    # A NaN whose mantissa bits are all set would round up into -0.0.
    nan = ops.full_like(value, float("nan"))
    return ops.where(ops.isnan(value), nan, value)


def fingerprints(tensors: Sequence) -> Any:
    """Returns hashes of 16-bit tensors as a vector of int32."""
    shapes: dict[tuple, list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        shapes[tuple(tensor.shape)].append(position)
    sums, order = [], []
    for shape, positions in shapes.items():
        order += positions
        hashed = [_hashed(tensors[position]) for position in positions]
        small, large = _TOGETHER
        count = large if math.prod(shape) > _LARGE else small
        for start in range(0, len(hashed), count):
            sums.append(compilation.sums(hashed[start : start + count]))
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return ops.take(ops.concatenate(sums), inverse)


def _hashed(tensor: Any) -> Any:
    # Elements are hashed with their positions before they are added up: a
    # plain weighted sum is the same for many pairs of constant tensors.
    words = compilation.bitcast(tensor, "uint16")
    words = compilation.bitcast(ops.cast(words, "uint32"), "int32")
    positions = ops.arange(math.prod(tensor.shape), dtype="int32")
    positions = ops.reshape(positions, tensor.shape)
    # As MurmurHash3 mixes bits, in arithmetic that wraps around.
    # Not `ops.add`, which takes an empty tensor for a bias.
    mixed = words + ops.multiply(positions, signed(0x9E3779B1))
    mixed = ops.bitwise_xor(mixed, ops.right_shift(mixed, signed(16)))
    mixed = ops.multiply(mixed, signed(0x85EBCA6B))
    return ops.bitwise_xor(mixed, ops.right_shift(mixed, signed(13)))


def unsigned(number: Any) -> Any:
    """Returns a uint32 constant."""
    return ops.cast(number, "uint32")


def signed(number: int) -> Any:
    """Returns an int32 constant with the lower 32 bits of a number."""
    return ops.cast((number + 2**31) % 2**32 - 2**31, "int32")


def upper(words: Any, shift: int) -> Any:
    """Shifts int32 to the right, and zeros in from the left."""
    shifted = ops.right_shift(words, signed(shift))
    return ops.bitwise_and(shifted, signed(2 ** (32 - shift) - 1))
