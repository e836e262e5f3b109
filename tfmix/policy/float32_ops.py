"""Op rules: which `keras.ops` run in float32 on 16-bit input."""

from collections.abc import Iterable

from tfmix import _arguments
from tfmix._keras import op_places
from tfmix.policy import float32_layers

# `python -m benchmarks.layers --part ops` compared these ops, and those that
# other libraries keep in float32, with float32: forward and backward, in both
# formats, under TensorFlow in graph mode and XLA, and under JAX. An op is on
# the list if a rule lets it run at all, makes it finite, or makes it 4 times
# more accurate under XLA (16 times in graph mode, where a CPU adds up in 16
# bit and accelerators do not). Exponentials, logarithms and powers are not
# worth their casts, because their results are rounded to 16 bit anyway (`exp`,
# `log1p`, `logsumexp`, `log_softmax`). Keras computes others in float32 by
# itself (`mean`, `var`, `layer_normalization`, `rms_normalization`). The
# `nan...` reductions, `exp2` and `psnr` are left out because no layer calls
# them.
DEFAULT_FLOAT32_OPS: tuple[str, ...] = (
    # Softmax and attention.
    *("softmax", "sparsemax", "dot_product_attention"),
    # Norms, sums and averages.
    *("norm", "normalize", "cdist", "sum", "average", "std", "cumsum"),
    *("corrcoef", "logaddexp", "logaddexp2", "segment_sum"),
    *("average_pool", "adaptive_average_pool"),
    # These activations overflow inside, or lose their gradient where they
    # saturate: 1 - y**2 is 0 once y is rounded to 1, and x + 3 is rounded onto
    # the kink at 6. In 16 bit, an LSTM's gradients have a third more error, by
    # Keras's formula from y as well as by one from x that does not saturate.
    *("softplus", "squareplus", "tanh", "sigmoid", "softsign", "selu"),
    *("hard_sigmoid", "sparse_sigmoid", "hard_silu"),
    # The cube of its result, in its gradient, overflows below 6e-4.
    "rsqrt",
    # These have no 16-bit kernels. The orthogonal initializer of every
    # recurrent layer needs `qr`.
    *("cholesky", "det", "eigh", "inv", "lstsq", "qr", "slogdet", "solve"),
    *("solve_triangular", "svd"),
    # The gradients of these losses are infinite where float32's are not.
    *("categorical_crossentropy", "sparse_categorical_crossentropy"),
    "binary_crossentropy",
)


def default_float32_ops(
    *, add: Iterable[str] = (), remove: Iterable[str] = ()
) -> list[str]:
    """Returns the default op rules, extended or shortened, as a fresh list.

    Use it to write a policy's own list:
    `Policy(name, float32_ops=Policy.default_float32_ops(add=["exp"]))`.

    Args:
        add: Names to append. Defaults to none.
        remove: Names to leave out. Defaults to none.

    Returns:
        A list of op names; changing it changes nothing else.

    Raises:
        ValueError: If a name in `add` is unknown or on the list already, or
            a name in `remove` is not on the list.

    Examples:
        >>> "softmax" in default_float32_ops()
        True
        >>> "sum" in default_float32_ops(remove=["sum"])
        False
    """
    allowed = "ops of the default list"
    kept = float32_layers.without(DEFAULT_FLOAT32_OPS, remove, allowed)
    return list(resolve([*kept, *add]))


def resolve(names: Iterable[str]) -> tuple[str, ...]:
    """Checks a list of op names and returns it as a tuple."""
    example = "['softmax', 'sum']"
    return float32_layers.distinct("float32_ops", names, _check, example)


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
            "`float32_ops` must name functions of `keras.ops` or "
            f"`keras.activations` that take tensors. Received: {name!r}."
            f"{_arguments.did_you_mean(name, op_places.op_names())}"
        )
