"""What is particular about single ops: one row for each, with its reason.

An op without a row computes as `compute` says for all.
"""

import keras

from tfmix.ops import attention, compute, losses_from_logits, weights
from tfmix.ops.compute import USUAL, Op

_ON_JAX = keras.backend.backend() == "jax"

# A sum computes in float32 what 16 bit would lose.
_SUM = Op(begins="sum")
# The results can be small or large for arguments that are neither.
_CURVE = Op(begins="curve")
# The argument is a probability p, or 1 - p, which 16 bit rounds; or the op
# multiplies a gradient that may be beyond float16 by 0.
_FLAT = Op(begins="flat")
# The derivative is unbounded near 0, for some near 1 as well.
_ROOT = Op(asks=(0,))
# A number beside a tensor is a choice, or a bound.
_CHOICE = Op(begins="flat", number="term")
# JAX divides the gradient by the square of the denominator, which may be zero.
_QUOTIENT = Op(number="factor", asks=(1,), is_wide=_ON_JAX)
# A number makes a tensor of a dtype.
_FILL = Op(number="term")
_CAST = Op(number="term", way=compute.converted)
# The gradient of a weight among inputs is a part of the result's.
_JOIN = Op(by_weight=compute.Call.plain)
# TensorFlow sums the gradients of all copies of a number in 16 bit.
_REPEAT = Op(is_wide=not _ON_JAX)
# A product of two small numbers is smaller.
_TIMES = Op(begins="product")
# A note would keep a larger tensor than the result.
_POOL = Op(passes="lost")


def _product(axes_of: weights.Axes) -> Op:
    """Returns the row of a product, which drops what is known of its factors.

    A small number is one of many in its sums.
    """
    return Op(passes="", by_weight=weights.product(axes_of))


def _convolution() -> Op:
    return Op(passes="", by_weight=weights.convolved)


OPS: dict[str, Op] = {
    # Sums and products with a weight, element by element.
    "add": Op(number="term", biases=True, by_weight=weights.summed(1, 1)),
    "subtract": Op(number="term", biases=True, by_weight=weights.summed(1, -1)),
    "multiply": Op(
        number="factor", begins="product", by_weight=weights.multiplied
    ),
    # Products of matrices, and convolutions.
    "matmul": _product(weights.of_matmul),
    "dot": _product(weights.of_dot),
    "inner": _product(weights.of_inner),
    "tensordot": _product(weights.of_tensordot),
    "einsum": _product(weights.of_einsum),
    "conv": _convolution(),
    "depthwise_conv": _convolution(),
    "conv_transpose": _convolution(),
    "separable_conv": Op(passes="", way=weights.separated),
    "dot_product_attention": Op(
        passes="", by_weight=compute.Call.plain, way=attention.attended
    ),
    # Its result has the dtype of its input, whatever its statistics have.
    "batch_normalization": Op(way=compute.normalized),
    # XLA makes the gradient of TensorFlow's 16-bit images float32, whatever it
    # compiles for, and then refuses the program.
    "resize": Op(is_wide=not _ON_JAX),
    # Made of other ops, they round their results themselves.
    **dict.fromkeys(("layer_normalization", "rms_normalization"), USUAL),
    # The gates of a recurrent layer.
    "split": Op(way=compute.parted),
    # It runs a function of its caller.
    "vectorized_map": Op(way=compute.mapped),
    **dict.fromkeys(("outer", "kron", "cross"), _TIMES),
    # A lookup, and what repeats numbers.
    "take": Op(way=weights.looked_up),
    **dict.fromkeys(
        ("take_along_axis", "broadcast_to", "repeat", "tile"), _REPEAT
    ),
    **dict.fromkeys(
        ("concatenate", "stack", "append", "hstack", "vstack", "dstack"), _JOIN
    ),
    # Quotients, roots and norms.
    **dict.fromkeys(("divide", "divide_no_nan", "true_divide"), _QUOTIENT),
    "power": Op(begins="power", asks=(0,)),
    **dict.fromkeys(
        (
            *("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"),
            *("cbrt", "normalize", "erfinv"),
            *("arccos", "arccosh", "arcsin", "arctanh"),
        ),
        _ROOT,
    ),
    # Their gradients divide by sums of squares.
    "arctan2": Op(asks=(0, 1), is_wide=True),
    "geomspace": Op(asks=(0, 1)),
    "hypot": Op(is_wide=True),
    # Roots of sums, which a quotient may use.
    **dict.fromkeys(("norm", "std"), Op(begins="sum", asks=(0,))),
    # Sums.
    **dict.fromkeys(
        (
            *("sum", "mean", "var", "average", "prod", "segment_sum"),
            *("moments", "vdot"),
        ),
        _SUM,
    ),
    **dict.fromkeys(("square", "exp", "exp2", "expm1", "cumprod"), _CURVE),
    # Saturating and flat functions, choices and bounds.
    **dict.fromkeys(
        ("softmax", "sigmoid"),
        Op(begins="flat", way=losses_from_logits.noting),
    ),
    **dict.fromkeys(
        (
            *("tanh", "softplus", "hard_sigmoid"),
            *("relu", "relu6", "abs", "absolute"),
        ),
        _FLAT,
    ),
    **dict.fromkeys(("maximum", "minimum", "clip", "where"), _CHOICE),
    # These make tensors of a dtype.
    **dict.fromkeys(("array", "full", "full_like"), _FILL),
    **dict.fromkeys(("cast", "convert_to_tensor"), _CAST),
    **dict.fromkeys(
        (
            *("max_pool", "average_pool"),
            *("adaptive_max_pool", "adaptive_average_pool"),
        ),
        _POOL,
    ),
}
