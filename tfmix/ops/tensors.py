"""Finds the 16-bit tensors in a nest, and casts them."""

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import kernels
from tfmix._keras import variables as keras_variables


def float_dtype(value: Any) -> str:
    """Returns a tensor's float dtype, "sparse" if it is that, else ""."""
    dtype = getattr(value, "dtype", None)
    kind: Any = type(value)
    return "" if dtype is None else known_dtype(kind, dtype)


@functools.cache
def known_dtype(kind: Any, dtype: Any) -> str:
    """Returns what `float_dtype` does, for a type and its dtype."""
    # Every op asks this of each argument, and most dtypes repeat. Layers and
    # metrics have a dtype too, but no shape.
    if not hasattr(kind, "shape"):
        return ""
    try:
        name = keras.backend.standardize_dtype(dtype)
    except (TypeError, ValueError):
        return ""
    if not name.startswith(("float", "bfloat", "complex")):
        return ""
    # Sparse and ragged tensors of both backends have these attributes.
    # `is_tensor` is true for a `tf.SparseTensor`, too.
    parts = ("todense", "indices", "row_splits")
    return "sparse" if any(hasattr(kind, part) for part in parts) else name


def is_16_bit(value: Any) -> bool:
    """Returns whether a value is a dense float16 or bfloat16 tensor."""
    return float_dtype(value) in _formats.SIXTEEN_BIT


def only_16_bit(nest: Any) -> str | None:
    """Returns the 16-bit dtype all float tensors of a nest share, else None."""
    seen = {float_dtype(leaf) for leaf in leaves(nest)} - {""}
    alike = len(seen) == 1 and seen <= set(_formats.SIXTEEN_BIT)
    return seen.pop() if alike else None


def snapshot(value: Any) -> Any:
    """Returns a variable's current value, and anything else unchanged."""
    # TensorFlow's variable is a reference, which later assignments change.
    is_variable = isinstance(value, keras.Variable)
    return keras_variables.read_by_layer(value) if is_variable else value


def to_float32(value: Any) -> Any:
    """Casts a 16-bit tensor to float32 and returns anything else unchanged."""
    if not is_16_bit(value):
        return value
    return kernels.cast(snapshot(value), "float32")


def narrow(value: Any, dtype: str) -> Any:
    """Casts a float32 tensor to a dtype and returns anything else unchanged."""
    if float_dtype(value) != "float32":
        return value
    return kernels.cast(value, dtype)


def rounded(nest: Any, dtype: str) -> Any:
    """Casts the float32 tensors of a nest."""
    return map_leaves(nest, lambda leaf: narrow(leaf, dtype))


def leaves(nest: Any) -> Iterator[Any]:
    """Yields the leaves of lists, tuples and dicts."""
    if not isinstance(nest, list | tuple | dict):
        yield nest
        return
    for inner in nest.values() if isinstance(nest, dict) else nest:
        yield from leaves(inner)


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
    if all(map(operator.is_, mapped, values)):
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


def with_leaves(nest: Any, others: Mapping[int, Any]) -> Any:
    """Returns a nest with other leaves in place of some, by the `id`s."""
    return map_leaves(nest, lambda leaf: others.get(id(leaf), leaf))
