"""Multiplies matrices in float8, each scaled by its own largest number.

Every product computes its scales again ("current scaling" in NVIDIA's
Transformer Engine). There is no state, so shared or frozen layers, replicas
and skipped steps need no special case. A scale is a power of two, which rounds
nothing. The formats are those of Micikevicius et al. 2022 ("FP8 Formats for
Deep Learning", arXiv:2209.05433): e4m3 in the forward pass, and e5m2, which
has a larger range, for gradients.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from tfmix._keras import float8_kernel, kernels
from tfmix.float8 import contraction
from tfmix.float8.contraction import Contraction


@dataclasses.dataclass(frozen=True)
class Format:
    """A float8 format."""

    dtype: str
    exponent: int  # the largest number is 1.75 * 2**exponent


FORWARD = Format("float8_e4m3fn", 8)
GRADIENT = Format("float8_e5m2", 15)
# The bits of a float32 hold its exponent plus 127. A scale does not exceed the
# highest power, so that float32 can hold its inverse as well.
_BIAS, _MANTISSA, _HIGHEST = 127, 23, 126
_ONE = 1 << _MANTISSA
# XLA reduces fewer than 16384 numbers in one kernel of a GPU, more in two.
_ROWS = 8192


def contracted(inputs: Any, weight: Any, equation: str) -> Any:
    """Multiplies a bfloat16 tensor by a weight, both rounded to float8.

    Args:
        inputs: The tensor.
        weight: The weight, in float32.
        equation: The einsum that the product is.

    Returns:
        The product; `None` for another dtype, or a batch of products.
    """
    dtype = keras.backend.standardize_dtype(inputs.dtype)
    ranks = len(inputs.shape), len(weight.shape)
    axes = contraction.of_einsum(equation, ranks)
    if dtype != "bfloat16" or axes is None:
        return None
    result = product(*factors(inputs, ops.cast(weight, dtype), axes))
    sizes = dict(zip(axes.inputs, ops.shape(inputs), strict=True))
    sizes |= dict(zip(axes.weight, weight.shape, strict=True))
    order = axes.free + axes.new
    result = ops.reshape(result, [sizes[letter] for letter in order])
    return ops.transpose(result, [order.index(x) for x in axes.outputs])


def factors(inputs: Any, weight: Any, axes: Contraction) -> tuple[Any, Any]:
    """Returns both factors as matrices (m, k) and (k, n)."""
    # The weight's own order of axes avoids a transposition in memory.
    return (
        matrix(inputs, axes.inputs, axes.free, axes.summed),
        matrix(weight, axes.weight, axes.summed, axes.new),
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
    """Multiplies two matrices in float8, in the backward pass as well.

    Args:
        a: Tensor (m, k) of a float dtype, (k, m) if it is to be transposed.
        b: Tensor (k, n), or (n, k).
        formats: The format of each matrix.
        transposed: Whether each is transposed first.

    Returns:
        Tensor (m, n) of the dtype of `a`, summed in float32. An entry is not
        finite if a number in its row of `a` or its column of `b` is not.
    """

    @ops.custom_gradient
    def multiply(a: Any, b: Any) -> Any:
        narrow_a, powers_a = rounded(a, formats[0])
        narrow_b, powers_b = rounded(b, formats[1])
        scaled = float8_kernel.float8_product(
            narrow_a,
            narrow_b,
            transposed,
            keras.backend.standardize_dtype(a.dtype),
        )
        result = ops.cast(scaled, "float32")
        for half in (1, 2):
            # The two are not multiplied first: that would be another kernel.
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
    # Rounding the factors again costs nothing, because compilers reuse the
    # results of the forward pass.
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
        The float8 matrix, and three numbers as a float32 vector: the scale,
        which is the largest power of two that lets no number overflow, and
        two negative powers of two whose product is its inverse. The inverse
        itself may be too small for float32. NaN and infinity stay.
    """
    # Numbers below `least` take the highest scale. Empty matrices need an
    # initial value, too.
    least = 2.0 ** (to.exponent - _HIGHEST)
    largest = ops.max(ops.abs(_joined(tensor)), axis=-1, initial=least)
    largest = ops.pad(largest, (0, 1), constant_values=least)
    # The powers are computed per row, before the minimum is taken: XLA fuses
    # ops before a reduction into it, while ops after it need another kernel.
    word = kernels.bitcast(ops.cast(largest, "float32"), "int32")
    powers = kernels.bitcast(ops.stack(_powers(word, to)), "float32")
    powers = ops.min(powers, axis=1)
    scaled = ops.multiply(tensor, ops.cast(powers[0], tensor.dtype))
    return ops.cast(scaled, to.dtype), powers


def _joined(matrix: Any) -> Any:
    """Returns the same numbers as a matrix of `_ROWS` rows or fewer."""
    rows = matrix.shape[0]
    # The number of rows may be unknown or odd; then the matrix stays larger.
    while rows and rows > _ROWS and rows % 2 == 0:
        rows //= 2
    same = rows == matrix.shape[0]
    return matrix if same else ops.reshape(matrix, (rows, -1))


def _powers(word: Any, to: Format) -> list[Any]:
    """Returns the bits of a scale, and of the two halves of its inverse."""
    # The exponent of the inverse lies above the mantissa. A mantissa above
    # 1.75 takes one more. Nothing is shared between the three results, because
    # compilers store what two results share.
    above = _ONE // 4 - 1
    inverse = word + (above - (_BIAS + to.exponent) * _ONE)
    scale = _BIAS * _ONE - ops.bitwise_and(inverse, -_ONE)
    return [scale, _half(inverse), _half(inverse + _ONE)]


def _half(inverse: Any) -> Any:
    """Returns the bits of -2**(exponent // 2)."""
    sign = -256
    exponent = ops.right_shift(inverse, _MANTISSA + 1)
    return ops.left_shift(exponent + (_BIAS + sign), _MANTISSA)
