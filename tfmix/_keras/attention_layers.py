"""The attention that two of Keras's layers write out by themselves.

With dropout, returned scores or more than one attention axis they do not call
`ops.dot_product_attention` but their own two matmuls and a softmax.

Checked on Keras 3.12.4 and 3.15.1. Where a later Keras has no such method
there is nothing to cover.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfmix._keras import layer_policies


def writes_out(layer: keras.Layer, arguments: dict[str, Any]) -> bool:
    """Says whether a call will not use `ops.dot_product_attention`."""
    dropout = getattr(layer, "_dropout", getattr(layer, "dropout", 0.0))
    scores = arguments.get("return_attention_scores") or getattr(
        layer, "_return_attention_scores", False
    )
    return dropout > 0.0 or scores or len(arguments["query"].shape) != 4


@contextlib.contextmanager
def float32_softmax(layer: keras.Layer) -> Iterator[None]:
    """Keeps the layer's own softmax from casting its logits to 16 bit."""
    softmax = getattr(layer, "_softmax", None)
    if softmax is None:
        yield
        return
    before = vars(softmax)["_dtype_policy"]
    layer_policies.set_policy(softmax, keras.DTypePolicy("float32"))
    try:
        yield
    finally:
        layer_policies.set_policy(softmax, before)
