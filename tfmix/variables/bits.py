"""Float32 numbers taken apart into bits, the same on every backend."""

from typing import Any

import keras
from keras import ops


def split(value: Any) -> tuple[Any, Any]:
    """Splits float32 into a bfloat16 and the 16 bits it lacks.

    The upper half is rounded to nearest, ties away from zero, and the lower
    half is what is missing, with a sign. Ties to even would not be
    invertible: the remainder +32768 does not fit, and -32768 would stand for
    both neighbours.

    Args:
        value: Float32 tensor of any shape.

    Returns:
        A bfloat16 and an int16 tensor of the same shape.

    Example:
        >>> upper, lower = split(ops.array([1.0 + 2.0**-20]))
        >>> float(upper[0]), int(lower[0])
        (1.0, 8)
    """
    bits = bitcast(quiet(value), "uint32")
    upper = ops.right_shift(ops.add(bits, unsigned(0x8000)), unsigned(16))
    lower = ops.bitwise_and(bits, unsigned(0xFFFF))
    return (
        bitcast(ops.cast(upper, "uint16"), "bfloat16"),
        bitcast(ops.cast(lower, "uint16"), "int16"),
    )


def join(upper: Any, lower: Any) -> Any:
    """Puts together what `split` took apart, exactly.

    Args:
        upper: Bfloat16 tensor of any shape.
        lower: Int16 tensor of the same shape.

    Returns:
        A float32 tensor of the same shape.
    """
    bits = ops.left_shift(
        ops.cast(bitcast(upper, "uint16"), "uint32"), unsigned(16)
    )
    # Sign-extended and added modulo 2**32.
    rest = bitcast(ops.cast(lower, "int32"), "uint32")
    return bitcast(ops.add(bits, rest), "float32")


def quiet(value: Any) -> Any:
    """Makes every NaN the same one.

    A NaN whose mantissa bits are all set would round up into -0.0.

    Args:
        value: Float32 tensor of any shape.

    Returns:
        A tensor of the same shape and dtype.
    """
    nan = ops.full_like(value, float("nan"))
    return ops.where(ops.isnan(value), nan, value)


def fingerprint(tensor: Any) -> Any:
    """Sums up the bits of a 16-bit tensor, each with its own odd weight.

    Changes if one element changes, and (but for chance, 2**-32) if several
    do. Tells whether somebody assigned a variable since the last look.

    Args:
        tensor: Float16 or bfloat16 tensor of any shape.

    Returns:
        A scalar int32 tensor.
    """
    words = ops.reshape(bitcast(tensor, "uint16"), (-1,))
    words = bitcast(ops.cast(words, "uint32"), "int32")
    weights = ops.arange(1, 2 * words.shape[0] + 1, 2, dtype="int32")
    return ops.sum(ops.multiply(words, weights))


def unsigned(number: int) -> Any:
    """A uint32 constant."""
    return ops.cast(number, "uint32")


def bitcast(tensor: Any, dtype: str) -> Any:
    """Reads the same bits as another dtype of the same size.

    Args:
        tensor: Tensor of any shape.
        dtype: Name of the dtype.

    Returns:
        A tensor of that dtype and the same shape.
    """
    tensor = ops.convert_to_tensor(tensor)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.bitcast(tensor, dtype)
    import jax

    return jax.lax.bitcast_convert_type(tensor, dtype)
