"""What a tensor was before a layer cast it to 16 bit."""

from typing import Any

import keras

from tfmix._keras import global_state, gradients, layers
from tfmix.gradient_scaling import tensors

_UNCAST = "_tfmix_uncast"


def note_uncast(source: Any, converted: Any, tensor: Any) -> None:
    """Remembers what a cast tensor was, and the mask of what it is made of."""
    global_state.put_note(converted, _UNCAST, tensor)
    layers.copy_mask(source, converted)  # which Keras 3.12 loses in a cast


def uncast(x: Any) -> Any:
    """Returns what a tensor was before a layer cast it, else the tensor."""
    original = None
    if keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor):
        original = global_state.note(x, _UNCAST)
    if original is None:
        return x
    if keras.backend.backend() != "tensorflow" or not keras.ops.is_tensor(x):
        return original
    # A tape inside of `call` may watch what `call` was given, the cast.
    exact = gradients.by_way_of(x, original)
    if exact is not original:
        layers.copy_mask(original, exact)
    return exact


def exact(value: Any) -> Any:
    """Returns a float tensor as float32, as it was before a cast if known."""
    value = uncast(value)
    if tensors.float_dtype(value) == "float64":
        return keras.ops.cast(value, "float32")
    return tensors.wide(value)
