"""Losses find the logits behind a softmax, also on JAX and in 16 bit.

On TensorFlow, Keras attaches the logits to the probabilities; a rule that
computes these in float32 would lose them. To JAX's arrays Keras attaches none:
there a sample wrong by more than 16 has loss 16.118 and gradient 0, also in
float32. So the ops note what they were given, whichever layer calls them.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import global_state

_ON_JAX = keras.backend.backend() == "jax"
# Ops that note their input beside their output.
ACTIVATIONS = ("softmax", "sigmoid")
# Losses of `keras.ops` that have a `from_logits`, and whose logits these are;
# on TensorFlow, Keras's own look for a note.
LOSSES: dict[str, str] = {}
if _ON_JAX:
    LOSSES = {
        "categorical_crossentropy": "softmax",
        "sparse_categorical_crossentropy": "softmax",
        "binary_crossentropy": "sigmoid",
    }


def noting(activation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an op of `ACTIVATIONS` that notes its input on its output."""

    @functools.wraps(activation)
    def compute(x: Any, **axis: Any) -> Any:
        result = activation(x, **axis)
        if _ON_JAX:
            note = {_key(activation.__name__, result, **axis): x}
            global_state.put_note(result, global_state.LOGITS, note)
        else:
            global_state.put_note(result, global_state.LOGITS_OF_KERAS, x)
        return result

    return compute


def recovering(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a cross-entropy of `LOSSES` that uses the logits noted."""
    activation = LOSSES[loss.__name__]

    @functools.wraps(loss)
    def compute(
        target: Any, output: Any, from_logits: bool = False, **axis: Any
    ) -> Any:
        logits = None
        if not from_logits and keras.ops.is_tensor(output):
            noted = global_state.note(output, global_state.LOGITS) or {}
            logits = noted.get(_key(activation, output, **axis))
        if logits is None:
            return loss(target, output, from_logits=from_logits, **axis)
        return loss(target, logits, from_logits=True, **axis)

    return compute


def _key(activation: str, probabilities: Any, axis: Any = -1) -> str:
    """Names an activation, with the axis that its results add up to 1 along.

    A loss along another axis takes the probabilities as they are.
    """
    if isinstance(axis, int) and axis < 0:
        axis += len(probabilities.shape)
    return f"{activation} along {axis}"
