"""Attention of 16-bit queries with a softmax of float32 logits."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import context, op_places
from tfmix.ops import apply, tensors


def dot_product_attention(call: apply.Call) -> Any:
    """Computes `dot_product_attention` where a rule asks for float32.

    TensorFlow's own kernels return 16-bit logits for 16-bit queries. A cast
    before them would keep a GPU from using its Tensor Cores. So the queries are
    scaled before the product, where it would overflow, rather than the logits
    after it.
    """
    if not call.is_ruled or not context.by_gpu_kernels():
        call.is_ruled = call.is_ruled and not op_places.has_float32_logits()
        return apply.apply(call)
    call.look()
    given = call.op.by_name(call.args, call.kwargs)
    query, scale = given["query"], given["scale"]
    if scale is None:
        scale = 1.0 / math.sqrt(given["key"].shape[-1])
    is_half = tensors.float_dtype(query) == "float16"
    if is_half and isinstance(scale, int | float) and scale > 0:
        # A power of two rounds nothing. Logits may reach a million.
        power = 2.0 ** (math.floor(math.log2(scale)) - 4)
        given |= {"query": query * power, "scale": scale / power}
    return call.op.run((), given)


def attention_in_float32(method: Callable) -> Callable:
    """Makes a layer's own attention compute as the op's rule does.

    Logits of 16-bit queries and keys overflow float16 there, too.
    """
    order = [*inspect.signature(method).parameters][1:]

    @functools.wraps(method)
    def attend(self: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = keras.tree.flatten((args, kwargs))
        dtypes = {*map(tensors.float_dtype, leaves)} - {""}
        given = {**kwargs, **dict(zip(order, args, strict=False))}
        # bfloat16's logits have float32's range.
        is_safe = dtypes == {"bfloat16"} and context.by_gpu_kernels()
        is_narrow = dtypes in ({"float16"}, {"bfloat16"})
        if is_safe or not (is_narrow and op_places.writes_out(self, given)):
            return method(self, *args, **kwargs)
        with op_places.float32_softmax(self):
            args, kwargs = tensors.map_leaves(
                (args, kwargs), tensors.to_float32
            )
            result = method(self, *args, **kwargs)
        return tensors.narrow(result, dtypes.pop())

    return attend
