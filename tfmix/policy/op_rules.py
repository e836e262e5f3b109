"""Op rules: which `keras.ops` run in float32 on 16-bit input."""

import difflib
from collections.abc import Iterable

from tfmix._keras import op_places

# What NNabla (Softmax, CumSum, CumProd, float sums), MXNet (137 ops of
# `amp/lists/symbol_fp16.py`), MindSpore (`auto_blacklist`) and torch.autocast
# (`ATen/autocast_mode.h`) keep in float32, in Keras's names. Element-wise ops
# whose only danger is the range of their result (square, multiply, divide)
# are left out: the result goes back to 16 bit, so float32 would cost two
# casts and change nothing. `benchmarks/layers.py` measured the activations.
DEFAULT_FLOAT32_OPS: tuple[str, ...] = (
    # Softmax and what is built like it.
    "softmax",
    "log_softmax",
    "sparsemax",
    "logsumexp",
    "logaddexp",
    "logaddexp2",
    "dot_product_attention",
    # Norms and normalisers.
    "norm",
    "normalize",
    "rms_normalization",
    "layer_normalization",
    "cdist",
    # Sums, means and products over many elements.
    "sum",
    "mean",
    "average",
    "var",
    "std",
    "prod",
    "cumsum",
    "cumprod",
    "trace",
    "corrcoef",
    "nansum",
    "nanmean",
    "nanvar",
    "nanstd",
    "nanprod",
    "nancumsum",
    "nancumprod",
    "segment_sum",
    "average_pool",
    "adaptive_average_pool",
    # Exponentials, logarithms and powers.
    "exp",
    "exp2",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "power",
    "sinh",
    "cosh",
    "erfinv",
    "softplus",
    "squareplus",
    # Activations whose gradient is lost where they saturate: 1 - y**2 is 0
    # once y is rounded to 1, and x + 3 is rounded onto the kink at 6.
    "tanh",
    "sigmoid",
    "softsign",
    "hard_sigmoid",
    "sparse_sigmoid",
    "hard_silu",
    "selu",
    # Linear algebra, which has no 16-bit kernels; the orthogonal start of
    # every recurrent layer is a `qr`.
    "cholesky",
    "det",
    "eigh",
    "inv",
    "lstsq",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "svd",
    # Losses.
    "categorical_crossentropy",
    "sparse_categorical_crossentropy",
    "binary_crossentropy",
    "psnr",
)


def default_float32_ops(
    *, add: Iterable[str] = (), remove: Iterable[str] = ()
) -> list[str]:
    """Returns the default list, extended or shortened, as a fresh copy.

    Use it to write a policy's own list:
    `Policy("mixed_float16", float32_ops=default_float32_ops(add=["gelu"]))`.

    Args:
        add: Names to append. Defaults to none.
        remove: Names to leave out. Defaults to none.

    Returns:
        A list of op names; changing it changes nothing else.

    Raises:
        ValueError: If a name in `add` is unknown or on the list already, or
            a name in `remove` is not on the list.

    Example:
        >>> "softmax" in default_float32_ops()
        True
        >>> "sum" in default_float32_ops(remove=["sum"])
        False
    """
    removed = list(remove)
    for name in removed:
        if name not in DEFAULT_FLOAT32_OPS:
            raise ValueError(
                "`remove` may only name ops of the default list. Received: "
                f"{name!r}.{_nearest(name, DEFAULT_FLOAT32_OPS)}"
            )
    kept = [name for name in DEFAULT_FLOAT32_OPS if name not in removed]
    return list(resolve([*kept, *add]))


def resolve(names: Iterable[str]) -> tuple[str, ...]:
    """Checks a list of op names.

    Args:
        names: Names as in `keras.ops` or `keras.activations`.

    Returns:
        The names as a tuple, in their order.

    Raises:
        TypeError: If `names` is no iterable of strings.
        ValueError: If a name is unknown to Keras or appears twice.

    Example:
        >>> resolve(["sum", "gelu"])
        ('sum', 'gelu')
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            "`float32_ops` must be a list of op names, for example "
            f"['softmax', 'sum']. Received: float32_ops={names!r}."
        )
    seen: list[str] = []
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                "`float32_ops` takes names, for example 'softmax'. "
                f"Received: {name!r} of type {type(name).__name__}."
            )
        if name in seen:
            raise ValueError(
                f"`float32_ops` names an op twice. Received: {name!r} again. "
                "Leave one of them out."
            )
        _check_known(name)
        seen.append(name)
    return tuple(seen)


def _check_known(name: str) -> None:
    # Names of the default list are taken in every Keras version, so that a
    # list written on a newer one (3.12 has no `nansum`) loads on an older.
    if name in DEFAULT_FLOAT32_OPS or op_places.is_op(name):
        return
    raise ValueError(
        "`float32_ops` must name functions of `keras.ops` or "
        f"`keras.activations` that take tensors. Received: {name!r}."
        f"{_nearest(name, op_places.op_names())}"
    )


def _nearest(name: str, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
