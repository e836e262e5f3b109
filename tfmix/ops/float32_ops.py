"""Runs Keras ops and penalties with 16-bit input in float32."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from tfmix import _formats
from tfmix._keras import compilation, op_places
from tfmix.ops import tensors


def in_float32(op: Callable) -> Callable:
    """Returns an op that computes 16-bit tensors in float32."""
    dtype_at = op_places.dtype_position(op)

    @functools.wraps(op)
    def rule(*args: Any, **kwargs: Any) -> Any:
        source = tensors.only_16_bit((args, kwargs))
        wanted = op_places.wanted_dtype(args, kwargs, dtype_at)
        if source is None or wanted not in (None, *_formats.SIXTEEN_BIT):
            return op(*args, **kwargs)
        result = widened_call(op, args, kwargs, dtype_at)
        narrow = functools.partial(tensors.narrow_once, dtype=wanted or source)
        return tensors.map_leaves(result, narrow)

    return rule


def widened_call(
    op: Callable, args: tuple, kwargs: dict, dtype_at: int | None = None
) -> Any:
    """Calls an op with float32 in place of each 16-bit tensor.

    Args:
        op: The op.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        dtype_at: The position of its argument `dtype`, if that may be 16-bit.
    """
    args, kwargs = tensors.map_leaves((args, kwargs), tensors.widen)
    if dtype_at is not None:
        args, kwargs = op_places.with_float32(args, kwargs, dtype_at)
    return op(*args, **kwargs)


def attention(op: Callable) -> Callable:
    """Returns `dot_product_attention` with a softmax of float32 logits.

    TensorFlow's own kernels return 16-bit logits for 16-bit queries. A cast
    before them would keep a GPU from using its Tensor Cores. So the queries are
    scaled before the product, where it would overflow, rather than the logits
    after it.
    """
    wide = in_float32(op)
    signature = inspect.signature(op)

    @functools.wraps(op)
    def rule(*args: Any, **kwargs: Any) -> Any:
        if not compilation.by_gpu_kernels():
            return wide(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        scale = given.get("scale")
        if scale is None:
            scale = 1.0 / math.sqrt(given["key"].shape[-1])
        is_half = tensors.float_dtype(given["query"]) == "float16"
        if is_half and isinstance(scale, int | float) and scale > 0:
            # A power of two rounds nothing. Logits may reach a million.
            power = 2.0 ** (math.floor(math.log2(scale)) - 4)
            given["query"] = given["query"] * power
            given["scale"] = scale / power
        return op(*bound.args, **bound.kwargs)

    return rule


def attention_in_float32(method: Callable) -> Callable:
    """Makes a layer's own attention compute as the op's rule does.

    Logits of 16-bit queries and keys overflow float16 there, too.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = tensors.only_16_bit((args, kwargs))
        bound = signature.bind(self, *args, **kwargs).arguments
        if source is None or not op_places.writes_out(self, bound):
            return method(self, *args, **kwargs)
        if source == "bfloat16" and compilation.by_gpu_kernels():
            # Its logits have float32's range.
            return method(self, *args, **kwargs)
        with op_places.float32_softmax(self):
            result = widened_call(functools.partial(method, self), args, kwargs)
        narrow = functools.partial(tensors.narrow, dtype=str(source))
        return tensors.map_leaves(result, narrow)

    return compute


def widened(method: Callable) -> Callable:
    """Returns a method that takes penalties in float32.

    Penalties become float32 here, before they meet a compiled loss.
    """

    @functools.wraps(method)
    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tensors.map_leaves((args, kwargs), tensors.wide)
        return method(self, *args, **kwargs)

    return take
