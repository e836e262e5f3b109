"""Losses find the logits behind a softmax on JAX, as Keras does on TensorFlow.

Keras attaches the logits to the probabilities, but not to JAX's arrays: there
a sample wrong by more than 16 has loss 16.118 and gradient 0, also in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import global_state, layer_policies

# Losses of `keras.ops` that have a `from_logits`, and whose logits these are.
LOSSES = {
    "categorical_crossentropy": "softmax",
    "sparse_categorical_crossentropy": "softmax",
    "binary_crossentropy": "sigmoid",
}


def remember(layer: keras.layers.Activation) -> None:
    """Lets a softmax or sigmoid note its input beside its output, on JAX."""
    name = getattr(layer.activation, "__name__", "")
    if keras.backend.backend() != "jax" or name not in LOSSES.values():
        return
    original = layer.call

    @functools.wraps(original)
    def call(inputs: Any) -> Any:
        outputs = original(inputs)
        global_state.put_note(outputs, global_state.LOGITS, {name: inputs})
        return outputs

    layer_policies.put(layer, "call", call)


def recovering(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a cross-entropy of `LOSSES` that uses remembered logits."""
    activation = LOSSES[loss.__name__]

    @functools.wraps(loss)
    def compute(
        target: Any, output: Any, from_logits: bool = False, **kwargs: Any
    ) -> Any:
        logits = None
        if not from_logits and keras.ops.is_tensor(output):
            noted = global_state.note(output, global_state.LOGITS) or {}
            logits = noted.get(activation)
        if logits is None:
            return loss(target, output, from_logits=from_logits, **kwargs)
        return loss(target, logits, from_logits=True, **kwargs)

    return compute
