"""Finds the 16-bit tensors in a nest, and what they were before a cast."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import global_state, gradients, layers

# On a 16-bit tensor: what it was before a layer, or a rule, rounded it; or how
# that is computed (`float32_values`).
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
    # Layers and metrics have a dtype too, but no shape. A tensor's own shape
    # may have to be made.
    is_tensor = hasattr(kind, "shape") or hasattr(value, "shape")
    return name if is_tensor else ""


@functools.cache
def _float_dtype(kind: Any, dtype: Any) -> str:
    # Asked of each argument of each op, and the same for most.
    name = keras.backend.standardize_dtype(dtype)
    if not name.startswith(("float", "bfloat", "complex")):
        return ""
    # Sparse and ragged tensors of both backends carry their parts under these
    # names; `is_tensor` alone is true for a `tf.SparseTensor`.
    parts = ("todense", "indices", "row_splits")
    return "sparse" if any(hasattr(kind, part) for part in parts) else name


def is_16_bit(value: Any) -> bool:
    """Says whether a value is a dense float16 or bfloat16 tensor."""
    return float_dtype(value) in _formats.SIXTEEN_BIT


def only_16_bit(nest: Any) -> str | None:
    """Returns the 16-bit dtype all float tensors of a nest share, else None."""
    seen = {float_dtype(leaf) for leaf in _leaves(nest)} - {""}
    alike = len(seen) == 1 and seen <= set(_formats.SIXTEEN_BIT)
    return seen.pop() if alike else None


def widen(value: Any) -> Any:
    """Casts a 16-bit tensor to float32 and leaves anything else alone."""
    return keras.ops.cast(value, "float32") if is_16_bit(value) else value


def narrow(value: Any, dtype: str) -> Any:
    """Casts a float32 tensor to a dtype and leaves anything else alone."""
    is_wide = float_dtype(value) == "float32"
    return keras.ops.cast(value, dtype) if is_wide else value


def narrow_once(value: Any, dtype: str) -> Any:
    """Casts as `narrow`; a scalar remembers its float32 value for `wide`.

    A large penalty that was summed in float32 so reaches `add_loss` as it is.
    """
    result = narrow(value, dtype)
    if result is not value and len(value.shape) == 0:
        # JAX arrays take no attributes; the penalty is then what the 16-bit
        # format can hold.
        with contextlib.suppress(AttributeError):
            setattr(result, UNCAST, value)
    return result


def wide(value: Any) -> Any:
    """Casts a 16-bit tensor to float32 and keeps what is noted on it.

    With the mask and the logits of the 16-bit tensor a masked metric and the
    loss of a softmax head stay right.
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
    """Remembers what a cast tensor was, and the mask of what it is made of."""
    global_state.put_note(converted, UNCAST, tensor)
    layers.copy_mask(source, converted)  # which Keras 3.12 loses in a cast


def uncast(x: Any) -> Any:
    """Returns what a tensor was before a layer cast it, else the tensor."""
    original = None
    if keras.ops.is_tensor(x) or isinstance(x, keras.KerasTensor):
        original = global_state.note(x, UNCAST)
    if not hasattr(original, "dtype"):
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

    Their types are kept, and what does not change is handed on as it is.
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
    # Not by the constructor, which may take what it likes.
    other = copy.copy(nest)
    for key, value in zip(keys, mapped, strict=True):
        other[key] = value
    return other
