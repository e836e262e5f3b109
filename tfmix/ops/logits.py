"""Makes losses use the logits behind a softmax on JAX, too.

On TensorFlow, Keras attaches the logits to the probabilities. On JAX it
attaches none: a sample wrong by more than 16 has loss 16.118 and gradient 0,
even in float32. So the ops note their inputs, whichever layer calls them.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix.ops import apply, tensors

# Losses of `keras.ops` with `from_logits`, and the activation that they invert.
# On TensorFlow, Keras's own losses also look for a note.
LOSSES: dict[str, str] = {}
if keras.backend.backend() == "jax":
    LOSSES = {
        "categorical_crossentropy": "softmax",
        "sparse_categorical_crossentropy": "softmax",
        "binary_crossentropy": "sigmoid",
    }


def with_logits(call: apply.Call) -> Any:
    """Computes an activation, and notes its input on its output."""
    args, kwargs = call.args, call.kwargs
    x = args[0] if args else kwargs["x"]
    result = apply.apply(call)
    axis = {k: v for k, v in kwargs.items() if k == "axis"}
    note = {_key(call.op.original.__name__, result, **axis): x}
    tensors.put_note(result, tensors.LOGITS, note)
    return result


def recovering(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a cross-entropy of `LOSSES` that uses the noted logits."""
    activation = LOSSES[loss.__name__]

    @functools.wraps(loss)
    def recovered(
        target: Any, output: Any, from_logits: bool = False, **axis: Any
    ) -> Any:
        logits = None
        if not from_logits and keras.ops.is_tensor(output):
            noted = tensors.note(output, tensors.LOGITS) or {}
            logits = noted.get(_key(activation, output, **axis))
        if logits is None:
            return loss(target, output, from_logits=from_logits, **axis)
        return loss(target, logits, from_logits=True, **axis)

    return recovered


def _key(activation: str, probabilities: Any, axis: Any = -1) -> str:
    """Names an activation, with the axis along which its results sum to 1.

    A loss along another axis uses the probabilities.
    """
    if isinstance(axis, int) and axis < 0:
        axis += len(probabilities.shape)
    return f"{activation} along {axis}"
