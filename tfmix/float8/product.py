"""A matrix product in float8, each factor scaled by its own largest number.

The scale is found anew in every product ("current scaling" in NVIDIA's
Transformer Engine), so that there is no state that sharing, freezing, replicas
or a skipped step could spoil. It is a power of two: to scale and to scale back
round nothing. The formats are those of Micikevicius et al. 2022 ("FP8 Formats
for Deep Learning", arXiv:2209.05433): e4m3 for what goes forward, e5m2, which
reaches further, for gradients.
"""

import dataclasses
from typing import Any

from keras import ops

from tfmix._keras import compilation
from tfmix.variables import bits


@dataclasses.dataclass(frozen=True)
class Format:
    """A float8 format."""

    dtype: str
    exponent: int  # of its largest number, which is 1.75 * 2**exponent


FORWARD = Format("float8_e4m3fn", 8)
GRADIENT = Format("float8_e5m2", 15)
# Of float32, whose exponents are 127 higher in its bits.
_BIAS, _MANTISSA, _LOWEST, _HIGHEST = 127, 23, -126, 126


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
        narrow_a, exponent_a = rounded(a, formats[0])
        narrow_b, exponent_b = rounded(b, formats[1])
        found = compilation.float8_product(narrow_a, narrow_b, transposed)
        # In two halves, of which each has a power in float32.
        exponent = ops.negative(exponent_a + exponent_b)
        half = ops.right_shift(exponent, 1)
        result = found * _power(half) * _power(exponent - half)
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
    """Scales a tensor into a format's range and rounds it to nearest.

    Returns:
        The float8 tensor, and the integer exponent of the scale: the largest
        that lets no number overflow. What is not finite stays so.
    """
    # Of no rows, too.
    largest = ops.cast(ops.max(ops.abs(tensor), initial=0), "float32")
    word = bits.bitcast(largest, "int32")
    found = ops.subtract(ops.right_shift(word, _MANTISSA), _BIAS)
    # Those above 1.75 take one more.
    above = ops.bitwise_and(word, 2**_MANTISSA - 1) > 3 * 2 ** (_MANTISSA - 2)
    exponent = to.exponent - found - ops.cast(above, "int32")
    exponent = ops.clip(exponent, _LOWEST, _HIGHEST)
    scaled = ops.multiply(tensor, ops.cast(_power(exponent), tensor.dtype))
    return ops.cast(scaled, to.dtype), exponent


def _power(exponent: Any) -> Any:
    """Returns two to an integer tensor's power, in float32."""
    return bits.bitcast(ops.left_shift(exponent + _BIAS, _MANTISSA), "float32")
