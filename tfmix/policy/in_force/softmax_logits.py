"""Losses find the logits behind a softmax on JAX, as Keras does on TensorFlow.

TensorFlow's backend hangs the logits on the probabilities and computes the
loss from them. JAX's arrays take no attributes, so a sample whose logits are
wrong by more than 16 has loss 16.118 and gradient 0 there, also in float32.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

_ATTRIBUTE = "_tfmix_logits"
# Losses that have a `from_logits`, and the activation that undoes each.
LOSSES = (
    "categorical_crossentropy",
    "sparse_categorical_crossentropy",
    "binary_crossentropy",
)
_ACTIVATIONS = ("softmax", "sigmoid")


def remember(layer: Any) -> None:
    """Lets an `Activation` layer note its input beside its output.

    Args:
        layer: A `keras.layers.Activation`; only softmax and sigmoid on JAX
            need it, others are left alone.
    """
    names = getattr(layer.activation, "__name__", "")
    if keras.backend.backend() != "jax" or names not in _ACTIVATIONS:
        return
    original = layer.call

    @functools.wraps(original)
    def call(inputs: Any) -> Any:
        outputs = original(inputs)
        _attributes().set_tensor_attr(outputs, _ATTRIBUTE, inputs)
        return outputs

    object.__setattr__(layer, "call", call)


def recovering(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a cross-entropy that computes from remembered logits.

    Args:
        loss: One of `keras.ops`, named in `LOSSES`.

    Returns:
        A function of the same arguments.
    """

    @functools.wraps(loss)
    def compute(
        target: Any, output: Any, from_logits: bool = False, **kwargs: Any
    ) -> Any:
        logits = None
        if not from_logits and keras.ops.is_tensor(output):
            logits = _attributes().get_tensor_attr(output, _ATTRIBUTE)
        if logits is None:
            return loss(target, output, from_logits=from_logits, **kwargs)
        return loss(target, logits, from_logits=True, **kwargs)

    return compute


def _attributes() -> Any:
    from keras.src.backend.common import tensor_attributes

    return tensor_attributes
