"""Splits, joins and hashes the bits of numbers, alike on every backend."""

import math
from collections.abc import Sequence
from typing import Any

from keras import ops

from tfmix._keras import kernels

# One kernel sums at most this many small, or large tensors, because it holds
# the hashes of all.
_TOGETHER = 32, 8


def split(value: Any) -> tuple[Any, Any]:
    """Splits float32 into a bfloat16 and an int16 with the other 16 bits."""
    # The upper half is rounded to nearest, ties away from zero, and the lower
    # half is the signed remainder. Ties to even would not be invertible: the
    # remainder +32768 does not fit, and -32768 would stand for both
    # neighbours.
    bits = kernels.bitcast(quiet(value), "uint32")
    upper = ops.right_shift(ops.add(bits, unsigned(0x8000)), unsigned(16))
    upper = kernels.bitcast(ops.cast(upper, "uint16"), "bfloat16")
    lower = ops.cast(ops.bitwise_and(bits, unsigned(0xFFFF)), "uint16")
    return upper, kernels.bitcast(lower, "int16")


def join(upper: Any, lower: Any) -> Any:
    """Reverses `split` exactly."""
    bits = ops.cast(kernels.bitcast(upper, "uint16"), "uint32")
    bits = ops.left_shift(bits, unsigned(16))
    # The remainder is sign-extended, and added modulo 2**32.
    rest = kernels.bitcast(ops.cast(lower, "int32"), "uint32")
    return kernels.bitcast(ops.add(bits, rest), "float32")


def refresh_master(master: Any, stored: Any) -> Any:
    """Returns a float32 master, updated where the 16-bit variable changed."""
    # `load_weights`, for example, assigns the 16-bit variable. An element that
    # was not assigned equals the rounded master exactly.
    master = ops.convert_to_tensor(master)
    stored = ops.convert_to_tensor(stored)
    rounded = ops.cast(master, stored.dtype)
    # Bits are compared, because XLA may skip a rounding before a computation.
    untouched = ops.equal(
        kernels.bitcast(rounded, "uint16"),
        kernels.bitcast(stored, "uint16"),
    )
    return ops.where(untouched, master, ops.cast(stored, "float32"))


def quiet(value: Any) -> Any:
    """Replaces every NaN of a float32 tensor by the default one."""
    # A NaN whose mantissa bits are all set would round up into -0.0.
    nan = ops.full_like(value, float("nan"))
    return ops.where(ops.isnan(value), nan, value)


def fingerprints(tensors: Sequence) -> Any:
    """Returns hashes of 16-bit tensors as a vector of int32."""

    def hashes(alike: list) -> Any:
        return kernels.sums([*map(_hash, alike)], _TOGETHER)

    return kernels.by_shape(tensors, hashes, lambda tensor: False)


def _hash(tensor: Any) -> Any:
    # Each element is hashed with its position before the sum, because a plain
    # weighted sum is the same for many pairs of constant tensors.
    words = kernels.bitcast(tensor, "uint16")
    words = kernels.bitcast(ops.cast(words, "uint32"), "int32")
    positions = ops.arange(math.prod(tensor.shape), dtype="int32")
    positions = ops.reshape(positions, tensor.shape)
    # MurmurHash3 mixes bits in this way, in arithmetic that wraps around.
    # `ops.add` would take an empty tensor for a bias, so `+` is used.
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
    """Shifts int32 to the right, and fills with zeros."""
    shifted = ops.right_shift(words, signed(shift))
    return ops.bitwise_and(shifted, signed(2 ** (32 - shift) - 1))
