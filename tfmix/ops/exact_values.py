"""The float32 tensor behind a 16-bit copy: a weight, or a layer's input.

A note on the copy holds it. Ops that compute in float32 take it in place of the
copy, and the gradient of a weight goes to it. A note that is not used costs
nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from tfmix import _formats
from tfmix._keras import global_state, kernels, layers
from tfmix._keras import variables as keras_variables
from tfmix.ops import tensors

# A tensor carries this note: a `Copy`.
NOTE = "_tfmix_copy"


class Copy(NamedTuple):
    """What a tensor is a copy of.

    Attributes:
        source: The float32 tensor; `None` for what is float32 itself.
        is_weight: Whether that is a variable, or is made of variables alone.
            Otherwise it is what a layer has cast.
    """

    source: Any
    is_weight: bool


def note(tensor: Any) -> Copy | None:
    """Returns the note on a tensor, `None` without one."""
    noted: Copy | None = global_state.note(tensor, NOTE)
    return noted


def weight_copy(weight: Any, copy: Any) -> Any:
    """Notes on a tensor which float32 weight it is a copy of, or itself is."""
    source = None if copy is weight else weight
    global_state.put_note(copy, NOTE, Copy(source, True))
    return copy


def input_copy(source: Any, copy: Any) -> Any:
    """Notes on a 16-bit tensor what it was before a cast."""
    global_state.put_note(copy, NOTE, Copy(source, False))
    return copy


def weight_of(tensor: Any) -> Any:
    """Returns the float32 weight behind a copy, `None` without one."""
    noted = note(tensor)
    if noted is None or not noted.is_weight:
        return None
    return tensor if noted.source is None else noted.source


def float32_value(tensor: Any) -> Any:
    """Returns a 16-bit tensor in float32, from before a cast if known.

    Anything else is returned unchanged.
    """
    if not tensors.is_16_bit(tensor):
        return tensor
    noted = note(tensor)
    if noted is None:
        return tensors.to_float32(tensor)
    return kernels.cast(noted.source, "float32")


def watching(original: Callable) -> Callable:
    """Returns the method by which a tape watches tensors.

    Their gradient goes to themselves, not to what they were before a cast.
    """

    @functools.wraps(original)
    def watch(tape: Any, tensor: Any) -> None:
        for each in keras.tree.flatten(tensor):
            if note(each) is not None:
                global_state.put_note(each, NOTE, None)
        original(tape, tensor)

    return watch


def is_exact(value: Any) -> bool:
    """Returns whether a 16-bit tensor is a copy of a weight."""
    return weight_of(value) is not None


def to_float32_with_notes(value: Any) -> Any:
    """Casts a 16-bit tensor to float32, and its logits; keeps its mask.

    Masked metrics and losses of softmax heads need both.
    """
    dtype = tensors.float_dtype(value)
    if dtype != "float32" and dtype not in _formats.SIXTEEN_BIT:
        return value
    result = float32_value(value)
    # Float32 probabilities may have 16-bit logits, which are cast then.
    global_state.copy_notes(value, result, tensors.to_float32)
    return result


def to_16_bit_with_notes(value: Any, dtype: str) -> Any:
    """Casts a float32 tensor to 16 bit and keeps its mask and its logits."""
    result = tensors.narrow(value, dtype)
    if result is not value:
        global_state.copy_notes(value, result)
    return result


def note_cast(source: Any, converted: Any, tensor: Any) -> None:
    """Notes what a layer has cast, and copies the mask of its source."""
    input_copy(tensor, converted)
    layers.copy_mask(source, converted)  # Keras 3.12 loses it in a cast


def before_cast(x: Any) -> Any:
    """Returns a tensor as it was before a layer cast it, else the tensor."""
    noted = None
    if keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor):
        noted = note(x)
    if noted is None or noted.is_weight:
        return x
    return noted.source


# These convert an input of a layer, by Keras's `convert_input`.


def remember(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Notes on what a layer casts what it was before."""
    x = keras_variables.read(x)
    tensor = original(x, False, dtype)
    converted = original(tensor, autocast, dtype)
    if converted is not tensor:
        note_cast(x, converted, tensor)
    return converted


def recover(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Gives a layer what it gets as it was before another layer cast it."""
    exact = before_cast(x)
    converted = original(exact, autocast, dtype)
    if converted is not exact:
        layers.copy_mask(exact, converted)
    return converted


def pass_on(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Gives a layer, which casts nothing, what it gets as it was before."""
    return original(before_cast(x), False, dtype)


def as_float32_input(value: Any) -> Any:
    """Returns a float tensor in float32, from before a layer's cast if known.

    It keeps its mask and its logits.
    """
    value = before_cast(value)
    if tensors.float_dtype(value) == "float64":
        return keras.ops.cast(value, "float32")
    return to_float32_with_notes(value)


def with_float32_arguments(method: Callable) -> Callable:
    """Returns a method that takes 16-bit tensors in float32, as penalties."""

    @functools.wraps(method)
    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tensors.map_leaves((args, kwargs), to_float32_with_notes)
        return method(self, *args, **kwargs)

    return take
