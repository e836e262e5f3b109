"""Works on the bits of numbers, alike on every backend."""

from typing import Any

from keras import ops

from tfmix._keras import kernels


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


def signed(number: int) -> Any:
    """Returns an int32 constant with the lower 32 bits of a number."""
    return ops.cast((number + 2**31) % 2**32 - 2**31, "int32")


def upper(words: Any, shift: int) -> Any:
    """Shifts int32 to the right, and fills with zeros."""
    shifted = ops.right_shift(words, signed(shift))
    return ops.bitwise_and(shifted, signed(2 ** (32 - shift) - 1))
