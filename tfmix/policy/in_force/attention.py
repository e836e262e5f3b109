"""Computes the attention that Keras's layers write out in float32.

With dropout, returned scores or more than one attention axis, the attention
layers do not call `ops.dot_product_attention` but their own two matmuls and
a softmax. Logits of 16-bit queries and keys overflow float16 there just the
same, so the rule of that op covers this method too.

Reaches into the private methods of two layers; checked on Keras 3.12.4 and
3.15.1. Where a later Keras has no such method there is nothing to cover.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfmix._keras import op_places
from tfmix.policy.in_force import tensors


def rule(original: Callable, in_force: Callable[[str], bool]) -> Callable:
    """Makes the method compute in float32 while the op's rule is in force.

    Args:
        original: The layer's method.
        in_force: Asked on every call whether the rule holds for the caller.

    Returns:
        A method of the same signature and result dtypes.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = tensors.only_16_bit((args, kwargs))
        bound = signature.bind(self, *args, **kwargs).arguments
        if (
            source is None
            or not in_force(op_places.ATTENTION)
            or not _writes_out(self, bound)
        ):
            return original(self, *args, **kwargs)
        args, kwargs = tensors.map_leaves((args, kwargs), tensors.widen)
        with _float32_softmax(self):
            result = original(self, *args, **kwargs)
        return tensors.map_leaves(
            result, functools.partial(tensors.narrow, dtype=source)
        )

    return compute


def _writes_out(layer: Any, arguments: dict[str, Any]) -> bool:
    """Says whether the layer will not call `ops.dot_product_attention`."""
    dropout = getattr(layer, "_dropout", getattr(layer, "dropout", 0.0))
    scores = arguments.get("return_attention_scores") or getattr(
        layer, "_return_attention_scores", False
    )
    return dropout > 0.0 or scores or len(arguments["query"].shape) != 4


@contextlib.contextmanager
def _float32_softmax(layer: Any) -> Iterator[None]:
    """Keeps the layer's own softmax from casting its logits to 16 bit."""
    softmax = getattr(layer, "_softmax", None)
    if softmax is None:
        yield
        return
    before = softmax._dtype_policy
    # Past Keras's setter, which would drop what was traced.
    object.__setattr__(softmax, "_dtype_policy", keras.DTypePolicy("float32"))
    try:
        yield
    finally:
        object.__setattr__(softmax, "_dtype_policy", before)
