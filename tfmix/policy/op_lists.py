"""The three lists of ops: narrow, wide, and float32 inside, with reasons.

They are torch.autocast's lists for Keras's ops. *Narrow* ops take 16 bit, even
beside float32. *Wide* ops compute in float32 and return float32. Ops that are
*float32 inside* compute in float32 and return 16 bit. All others take what
comes. A policy's `float32_ops` are the last two lists, or a list of your own.

`tests/ops/test_every_op.py` compares every op, in each role, with float32.
`python -m benchmarks.layers --part ops` measures them on large tensors.
"""

from collections.abc import Iterable

from tfmix import _arguments
from tfmix._keras import op_places
from tfmix.policy import float32_layers

# Accelerators multiply 16-bit matrices on Tensor Cores and sum in float32.
NARROW = frozenset(
    (
        *("matmul", "dot", "inner", "tensordot", "einsum"),
        *("conv", "depthwise_conv", "conv_transpose", "separable_conv"),
    )
)

WIDE: tuple[str, ...] = (
    # Sums over many terms overflow float16, and lose digits in bfloat16.
    *("sum", "mean", "average", "var", "std", "moments", "segment_sum"),
    *("nansum", "nanmean", "nanvar", "nanstd", "trace", "trapezoid", "vdot"),
    *("cumsum", "nancumsum", "bincount", "scatter", "corrcoef", "cdist"),
    *("norm", "normalize", "logsumexp", "logaddexp", "logaddexp2"),
    *("psnr", "ssim"),
    # They fill empty segments with the lowest number of the dtype.
    *("segment_max", "segment_min"),
    # Products and powers leave float16's range in a few steps.
    *("prod", "nanprod", "cumprod", "nancumprod", "segment_prod", "vander"),
    *("square", "power", "exp", "exp2", "expm1", "sinh", "cosh", "i0"),
    *("geomspace", "logspace"),
    # Their derivatives are unbounded near 0, or near 1.
    *("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "cbrt", "reciprocal"),
    *("divide", "true_divide", "divide_no_nan", "hypot", "arctan2", "erfinv"),
    *("arccos", "arccosh", "arcsin", "arctanh"),
    # 16 bit rounds what saturates to 1, where its derivative is 0.
    *("softmax", "log_softmax", "sparsemax", "sigmoid", "log_sigmoid"),
    *("softplus", "tanh", "hard_sigmoid", "sparse_sigmoid", "softsign"),
    # No 16-bit kernel exists.
    *("cholesky", "cholesky_inverse", "det", "eig", "eigh", "inv", "logdet"),
    *("lstsq", "lu_factor", "pinv", "slogdet", "solve"),
    *("solve_triangular", "svd"),
    *("fft", "fft2", "ifft2", "rfft", "irfft", "stft", "istft"),
    # The gradients of these losses are infinite where float32's are not.
    *("categorical_crossentropy", "sparse_categorical_crossentropy"),
    *("binary_crossentropy", "ctc_loss"),
)

# A result is as large as the activations that it is made of, so 16 bit halves
# the memory of what a layer hands on.
INSIDE: tuple[str, ...] = (
    *("batch_normalization", "layer_normalization", "rms_normalization"),
    # Its products take 16 bit, and the softmax between them float32.
    "dot_product_attention",
    *("average_pool", "adaptive_average_pool"),
    # These activations overflow inside.
    *("selu", "squareplus", "hard_silu"),
    # The orthogonal initializer hands it on as a recurrent layer's weight.
    "qr",
    # Their gradients sum over all places of a number.
    *("take_along_axis", "broadcast_to", "repeat", "tile", "resize"),
    # It computes places of pixels, and draws, in the dtype of its image.
    "elastic_transform",
)

DEFAULT_FLOAT32_OPS = (*WIDE, *INSIDE)

# These lists say what an op on none of the three does with its arguments.

# A number beside a tensor is a value. Elsewhere it is a size, an axis, or a
# setting.
TAKES_VALUES = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "true_divide", "mod"),
        *("maximum", "minimum", "clip", "where", "floor_divide", "fmod"),
        *("array", "full", "full_like", "cast", "convert_to_tensor"),
    )
)
QUOTIENTS = frozenset(("divide", "true_divide"))
# The einsum that multiplies rows by a matrix, as `Dense` does.
ROWS = "...x,xy->...y"
CONVOLUTIONS = frozenset(("conv", "depthwise_conv", "conv_transpose"))
# These place tensors beside each other. The gradient of one is a part of the
# result's.
JOINS = frozenset(
    ("concatenate", "stack", "append", "hstack", "vstack", "dstack")
)
# Ids, times and raw features lose digits in a cast, which show after these.
ARITHMETIC = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "mod", "floor_divide"),
        *("fmod", "floor", "ceil", "round", "trunc", "equal", "not_equal"),
        *("less", "less_equal", "greater", "greater_equal"),
    )
)
# What they return of an input that was only cast is such an input again.
MOVES = frozenset(
    (
        *("get_item", "slice", "take", "split", "unstack", "squeeze"),
        *("reshape", "expand_dims", "ravel", "transpose", "swapaxes"),
        *("moveaxis", "flip"),
    )
)
# They return no numbers that a format rounds, so they stay Keras's own.
EXACT = frozenset(
    (
        *("zeros", "ones", "zeros_like", "ones_like", "eye", "one_hot"),
        *("any", "all", "logical_and", "logical_not", "logical_or"),
        *("isfinite", "isinf", "isnan", "argmax", "argmin", "argsort"),
    )
)
# 16 bit rounds a large angle by more than a turn. So these take what code of a
# user has cast to 16 bit.
OF_ANGLES = frozenset(("cos", "sin", "tan"))


def default_float32_ops(*, add: Iterable[str] = ()) -> list[str]:
    """Returns the default op rules, extended, as a fresh list.

    Use it to write a policy's own list:
    `Policy(name, float32_ops=Policy.default_float32_ops(add=["cos"]))`. An op
    that you add computes in float32 and returns float32.

    Args:
        add: Names to append. Defaults to none.

    Returns:
        A list of op names; changing it changes nothing else.

    Raises:
        ValueError: If a name in `add` is unknown.

    Examples:
        >>> "softmax" in default_float32_ops()
        True
    """
    return list(resolve([*DEFAULT_FLOAT32_OPS, *add]))


def resolve(names: Iterable[str]) -> tuple[str, ...]:
    """Checks a list of op names and returns it as a tuple."""
    example = "['softmax', 'sum']"
    return float32_layers.checked("float32_ops", names, _check, example)


def _check(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(
            "`float32_ops` takes names, for example 'softmax'. "
            f"Received: {name!r} of type {type(name).__name__}."
        )
    # Every Keras version accepts the names of the default list, so that a list
    # written on a newer version loads on an older one.
    if name not in DEFAULT_FLOAT32_OPS and not op_places.is_op(name):
        raise ValueError(
            "`float32_ops` must name functions of `keras.ops` that take "
            f"tensors. Received: {name!r}."
            f"{_arguments.did_you_mean(name, op_places.op_names())}"
        )
