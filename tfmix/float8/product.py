"""A matrix product in float8, each factor scaled by its own largest number.

The scale is found anew in every product ("current scaling" in NVIDIA's
Transformer Engine), so that there is no state that sharing, freezing, replicas
or a skipped step could spoil. It is a power of two: to scale and to scale back
round nothing. The formats are those of Micikevicius et al. 2022 ("FP8 Formats
for Deep Learning", arXiv:2209.05433): e4m3 for what goes forward, e5m2, which
reaches further, for gradients.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import compilation
from tfmix.gradient_scaling.contraction import Contraction


@dataclasses.dataclass(frozen=True)
class Format:
    """A float8 format."""

    dtype: str
    exponent: int  # of its largest number, which is 1.75 * 2**exponent


FORWARD = Format("float8_e4m3fn", 8)
GRADIENT = Format("float8_e5m2", 15)
# Of float32, whose exponents are 127 higher in its bits. A scale is no larger
# than the highest power, so that its inverse is one, too.
_BIAS, _MANTISSA, _HIGHEST = 127, 23, 126
_ONE = 1 << _MANTISSA
# XLA reduces fewer than 16384 numbers in one kernel of a GPU, more in two.
_ROWS = 8192


def contracted(inputs: Any, weight: Any, axes: Contraction) -> Any:
    """Multiplies a bfloat16 tensor by a weight, both rounded to float8.

    Returns:
        The product; `None` for another dtype, or a batch of products.
    """
    dtype = keras.backend.standardize_dtype(inputs.dtype)
    if dtype != "bfloat16" or axes.batch:
        return None
    result = product(*factors(inputs, ops.cast(weight, dtype), axes))
    sizes = dict(zip(axes.inputs, ops.shape(inputs), strict=True))
    sizes |= dict(zip(axes.weight, weight.shape, strict=True))
    order = axes.free + axes.new
    result = ops.reshape(result, [sizes[letter] for letter in order])
    return ops.transpose(result, [order.index(x) for x in axes.outputs])


def factors(inputs: Any, weight: Any, axes: Contraction) -> tuple[Any, Any]:
    """Returns both factors as matrices (m, k) and (k, n)."""
    # In the order in which the weight lies in memory.
    summed = [x for x in axes.weight if x in axes.summed]
    return (
        matrix(inputs, axes.inputs, axes.free, summed),
        matrix(weight, axes.weight, summed, axes.new),
    )


def matrix(
    tensor: Any, letters: str, rows: Sequence[str], columns: Sequence[str]
) -> Any:
    """Returns a tensor, which has a letter for each axis, as a matrix."""
    order = [letters.index(letter) for letter in (*rows, *columns)]
    tensor = ops.transpose(tensor, order)
    width = math.prod(tensor.shape[len(rows) :])
    return ops.reshape(tensor, (-1, width))


def product(
    a: Any,
    b: Any,
    formats: tuple[Format, Format] = (FORWARD, FORWARD),
    transposed: tuple[bool, bool] = (False, False),
) -> Any:
    """Multiplies two matrices, rounded to float8; so do its gradients.

    Args:
        a: Tensor (m, k) of a float dtype, (k, m) if it is to be transposed.
        b: Tensor (k, n), or (n, k).
        formats: What each is rounded to.
        transposed: Whether each is transposed first.

    Returns:
        Tensor (m, n) of the dtype of `a`, summed in float32. Not finite where
        a number of the same row or column is not.
    """

    @ops.custom_gradient
    def multiply(a: Any, b: Any) -> Any:
        narrow_a, powers_a = rounded(a, formats[0])
        narrow_b, powers_b = rounded(b, formats[1])
        scaled = compilation.float8_product(
            narrow_a,
            narrow_b,
            transposed,
            keras.backend.standardize_dtype(a.dtype),
        )
        result = ops.cast(scaled, "float32")
        for half in (1, 2):
            # One by one: the product of both would be a kernel of its own.
            result = result * powers_a[half] * powers_b[half]
        result = ops.cast(result, a.dtype)

        def gradient(*arguments: Any, upstream: Any = None) -> tuple:
            g = arguments[0] if upstream is None else upstream
            return _gradients(a, b, g, formats, transposed)

        return result, gradient

    return multiply(a, b)


def _gradients(
    a: Any,
    b: Any,
    g: Any,
    formats: tuple[Format, Format],
    transposed: tuple[bool, bool],
) -> tuple[Any, Any]:
    # To round the factors again costs nothing: compilers see that it was done.
    (of_a, of_b), (flip_a, flip_b) = formats, transposed
    if flip_a:
        to_a = product(b, g, (of_b, GRADIENT), (flip_b, True))
    else:
        to_a = product(g, b, (GRADIENT, of_b), (False, not flip_b))
    if flip_b:
        to_b = product(g, a, (GRADIENT, of_a), (True, flip_a))
    else:
        to_b = product(a, g, (of_a, GRADIENT), (not flip_a, False))
    return ops.cast(to_a, a.dtype), ops.cast(to_b, b.dtype)


def rounded(tensor: Any, to: Format) -> tuple[Any, Any]:
    """Scales a matrix into a format's range and rounds it to nearest.

    Returns:
        The float8 matrix, and three powers of two as a float32 vector: the
        scale, which is the largest that lets no number overflow, and two
        negative ones whose product is its inverse. Of them each has its
        place in float32. What is not finite stays so.
    """
    # The largest that takes the highest scale; matrices may have no numbers.
    least = 2.0 ** (to.exponent - _HIGHEST)
    largest = ops.max(ops.abs(_joined(tensor)), axis=-1, initial=least)
    largest = ops.pad(largest, (0, 1), constant_values=least)
    # The powers of rows, then the least of all: what comes after a
    # reduction would be a kernel of its own, what comes before is not.
    word = compilation.bitcast(ops.cast(largest, "float32"), "int32")
    powers = compilation.bitcast(ops.stack(_powers(word, to)), "float32")
    powers = ops.min(powers, axis=1)
    scaled = ops.multiply(tensor, ops.cast(powers[0], tensor.dtype))
    return ops.cast(scaled, to.dtype), powers


def _joined(matrix: Any) -> Any:
    """Returns a matrix of the same numbers in no more than `_ROWS` rows."""
    rows = matrix.shape[0]
    # Their number may not be known, and may have no such divisor.
    while rows and rows > _ROWS and rows % 2 == 0:
        rows //= 2
    same = rows == matrix.shape[0]
    return matrix if same else ops.reshape(matrix, (rows, -1))


def _powers(word: Any, to: Format) -> list[Any]:
    """Returns the bits of a scale, and of the two halves of its inverse."""
    # The inverse's exponent, above the mantissa: those above 1.75 take one
    # more. Each is computed by itself, since compilers keep what two share.
    above = _ONE // 4 - 1
    inverse = word + (above - (_BIAS + to.exponent) * _ONE)
    scale = _BIAS * _ONE - ops.bitwise_and(inverse, -_ONE)
    return [scale, _half(inverse), _half(inverse + _ONE)]


def _half(inverse: Any) -> Any:
    """Returns the bits of minus two to half an exponent, rounded down."""
    sign = -256
    exponent = ops.right_shift(inverse, _MANTISSA + 1)
    return ops.left_shift(exponent + (_BIAS + sign), _MANTISSA)
