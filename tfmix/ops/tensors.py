"""Finds the 16-bit tensors in a nest, and their values before a cast."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import compilation, global_state, gradients, layers

# A 16-bit tensor carries this note: its value before a layer or a rule rounded
# it, or how to compute that (`float32_values`).
UNCAST = "_tfmix_uncast"


def float_dtype(value: Any) -> str:
    """Returns a tensor's float dtype, "sparse" if it is that, else ""."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return ""
    kind: Any = type(value)
    try:
        name = _float_dtype(kind, dtype)
    except (TypeError, ValueError):
        return ""
    # Layers and metrics have a dtype too, but no shape.
    return name if has_shape(value) else ""


def has_shape(value: Any) -> bool:
    """Returns whether a value has a shape, as tensors and variables do."""
    # A tensor's own shape may have to be made.
    return hasattr(type(value), "shape") or hasattr(value, "shape")


@functools.cache
def _float_dtype(kind: Any, dtype: Any) -> str:
    # Every op asks this of each argument, and most dtypes repeat.
    name = keras.backend.standardize_dtype(dtype)
    if not name.startswith(("float", "bfloat", "complex")):
        return ""
    # Sparse and ragged tensors of both backends have these attributes.
    # `is_tensor` is true for a `tf.SparseTensor`, too.
    parts = ("todense", "indices", "row_splits")
    return "sparse" if any(hasattr(kind, part) for part in parts) else name


def is_16_bit(value: Any) -> bool:
    """Returns whether a value is a dense float16 or bfloat16 tensor."""
    return float_dtype(value) in _formats.SIXTEEN_BIT


def holds_16_bit(nest: Any) -> bool:
    """Returns whether a tensor of a nest is 16-bit."""
    return any(map(is_16_bit, _leaves(nest)))


def only_16_bit(nest: Any) -> str | None:
    """Returns the 16-bit dtype all float tensors of a nest share, else None."""
    seen = {float_dtype(leaf) for leaf in _leaves(nest)} - {""}
    alike = len(seen) == 1 and seen <= set(_formats.SIXTEEN_BIT)
    return seen.pop() if alike else None


def snapshot(value: Any) -> Any:
    """Returns a variable's current value, and anything else unchanged."""
    # TensorFlow's variable is a reference, which later assignments change.
    is_variable = isinstance(value, keras.Variable)
    return compilation.read(value) if is_variable else value


def widen(value: Any) -> Any:
    """Casts a 16-bit tensor to float32 and returns anything else unchanged."""
    return keras.ops.cast(value, "float32") if is_16_bit(value) else value


def narrow(value: Any, dtype: str) -> Any:
    """Casts a float32 tensor to a dtype and returns anything else unchanged."""
    is_wide = float_dtype(value) == "float32"
    return keras.ops.cast(value, dtype) if is_wide else value


def narrow_once(value: Any, dtype: str) -> Any:
    """Casts as `narrow`; a scalar keeps its float32 value for `wide`.

    So a large penalty that was summed in float32 reaches `add_loss` unchanged.
    """
    result = narrow(value, dtype)
    if result is not value and len(value.shape) == 0:
        # JAX arrays take no attributes. The penalty is then limited to the
        # range of the 16-bit format.
        with contextlib.suppress(AttributeError):
            setattr(result, UNCAST, value)
    return result


def wide(value: Any) -> Any:
    """Casts a 16-bit tensor to float32 and keeps its notes.

    Masked metrics and losses of softmax heads need the mask and the logits that
    are noted on the 16-bit tensor.
    """
    if not is_16_bit(value):
        return value
    is_scalar = getattr(value, "ndim", None) == 0
    result = getattr(value, UNCAST, None) if is_scalar else None
    if float_dtype(result) != "float32":
        result = keras.ops.cast(value, "float32")
    global_state.copy_notes(value, result, widen)
    return result


def note_uncast(source: Any, converted: Any, tensor: Any) -> None:
    """Notes the tensor before a cast, and copies the mask of its source."""
    global_state.put_note(converted, UNCAST, tensor)
    layers.copy_mask(source, converted)  # Keras 3.12 loses it in a cast


def uncast(x: Any) -> Any:
    """Returns a tensor as it was before a layer cast it, else the tensor."""
    original = None
    if keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor):
        original = global_state.note(x, UNCAST)
    if not hasattr(original, "dtype"):
        return x
    if keras.backend.backend() != "tensorflow" or not keras.ops.is_tensor(x):
        return original
    # A tape inside `call` may watch the argument of `call`, which is the cast.
    exact = gradients.by_way_of(x, original)
    if exact is not original:
        layers.copy_mask(original, exact)
    return exact


def exact(value: Any) -> Any:
    """Returns a float tensor in float32, from before a cast if known."""
    value = uncast(value)
    if float_dtype(value) == "float64":
        return keras.ops.cast(value, "float32")
    return wide(value)


def _leaves(nest: Any) -> Iterator[Any]:
    """Yields the leaves of lists, tuples and dicts."""
    if not isinstance(nest, list | tuple | dict):
        yield nest
        return
    for inner in nest.values() if isinstance(nest, dict) else nest:
        yield from _leaves(inner)


def map_leaves(nest: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to the leaves of lists, tuples and dicts.

    Types are kept, and parts that do not change are returned as they are.
    """
    if isinstance(nest, dict):
        keys, values = list(nest), list(nest.values())
    elif isinstance(nest, list | tuple):
        keys, values = list(range(len(nest))), list(nest)
    else:
        return function(nest)
    mapped = [map_leaves(value, function) for value in values]
    if all(new is old for new, old in zip(mapped, values, strict=True)):
        return nest
    if hasattr(type(nest), "_fields"):
        return type(nest)(*mapped)
    if isinstance(nest, tuple):
        return tuple.__new__(type(nest), mapped)
    # A copy is made because the constructor may take other arguments.
    other = copy.copy(nest)
    for key, value in zip(keys, mapped, strict=True):
        other[key] = value
    return other
