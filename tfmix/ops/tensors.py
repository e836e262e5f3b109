"""Casts tensors, and notes on them what they were before.

A note on a 16-bit tensor holds the float32 tensor behind it: a weight, or an
input of a layer as it came. Ops that compute in float32 take it in place of the
copy, and the gradient of a weight goes to it. A note that is not used costs
nothing.
"""

import copy
import functools
import numbers
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tfmix import _formats
from tfmix._keras import context, layers
from tfmix._keras import variables as keras_variables

# A tensor carries this note: a `Copy`.
COPY = "_tfmix_copy"
# What code of a user has cast to 16 bit carries this one: the float32 tensor.
ANGLE = "_tfmix_angle"
# Notes on probabilities hold their logits. Keras's losses use Keras's note, on
# TensorFlow only.
LOGITS_OF_KERAS, LOGITS = context.LOGITS, "_tfmix_logits"
# Losses and metrics read these notes of a tensor.
NOTES = (context.MASK, LOGITS_OF_KERAS, LOGITS)
# The notes on JAX's arrays, which take no attributes, by the `id` of the array.
# Each is forgotten when its array dies.
_of_arrays: dict[tuple[int, str], tuple[Any, Any]] = {}
_NOTHING: dict[str, Any] = {}
_ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
if _ON_TENSORFLOW:
    import tensorflow as tf

    ARRAYS: Any = tf.Tensor
else:
    import jax

    ARRAYS = jax.Array, jax.core.Tracer, np.ndarray
_NESTS = list, tuple, dict
_DATA = (numbers.Number, np.generic, np.ndarray)


class Copy(NamedTuple):
    """What a tensor is a copy of.

    Attributes:
        source: The float32 tensor; `None` for what is float32 itself.
        is_weight: Whether that is a variable, or is made of variables alone.
            Otherwise it is what a layer has cast.
    """

    source: Any
    is_weight: bool


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


def cast(tensor: Any, dtype: str) -> Any:
    """Casts a tensor by the backend's own function, replaced or not."""
    if not _ON_TENSORFLOW:
        return jax.numpy.asarray(tensor, dtype)
    # `tf.cast` takes twice as long in eager mode.
    wanted = tf.as_dtype(dtype)
    is_same = wanted == tensor.dtype
    return tensor if is_same else tf.raw_ops.Cast(x=tensor, DstT=wanted)


def to_float32(value: Any) -> Any:
    """Returns a 16-bit tensor in float32, from before a cast if known.

    Anything else is returned unchanged.
    """
    if not is_16_bit(value):
        return value
    noted = note(value)
    if noted is not None:
        value = noted.source
    elif isinstance(value, keras.Variable):
        value = keras_variables.read_by_layer(value)
    return cast(value, "float32")


def narrow(nest: Any, dtype: str) -> Any:
    """Casts the float32 tensors of a nest; returns anything else unchanged."""

    def narrowed(leaf: Any) -> Any:
        return cast(leaf, dtype) if float_dtype(leaf) == "float32" else leaf

    return map_leaves(nest, narrowed)


def note(tensor: Any, name: str = COPY) -> Any:
    """Returns a note of a tensor, `None` if it has none."""
    if _ON_TENSORFLOW:
        # Keras asks for an attribute, and TensorFlow looks long for one that
        # its tensors lack.
        return getattr(tensor, "__dict__", _NOTHING).get(name)
    if name == context.MASK:
        return context.get_attribute(tensor, name)
    return _of_arrays.get((id(tensor), name), (None, None))[1]


def put_note(tensor: Any, name: str, value: Any) -> None:
    """Adds a note to a tensor; results computed from it do not inherit it."""
    # Numbers and NumPy arrays may be the caller's data, so they get no notes.
    if tensor is None or isinstance(tensor, _DATA):
        return
    if _ON_TENSORFLOW:
        # `setattr` makes no dictionary under Python 3.11. TensorFlow then makes
        # one while Python collects garbage; long eager runs have crashed there.
        tensor.__dict__[name] = value
    elif name == context.MASK:
        context.set_attribute(tensor, name, value)
    else:
        # Keras's function takes as long as an op.
        key = id(tensor), name
        forget = functools.partial(_of_arrays.pop, key)
        _of_arrays[key] = weakref.ref(tensor, forget), value


def copy_notes(
    source: Any, target: Any, change: Callable[[Any], Any] = lambda x: x
) -> Any:
    """Copies the notes for losses and metrics, each changed by a function.

    Returns the target.
    """
    for name in NOTES:
        value = note(source, name)
        if value is not None:
            changed = keras.tree.map_structure(change, value)
            if target is not source or changed is not value:
                put_note(target, name, changed)
    return target


def noted_copy(source: Any, copy: Any, is_weight: bool) -> Any:
    """Notes on a tensor what float32 tensor it is a copy of; returns it.

    A weight that is float32 itself is noted as one, too.
    """
    put_note(copy, COPY, Copy(None if copy is source else source, is_weight))
    return copy


def weight_of(tensor: Any) -> Any:
    """Returns the float32 weight behind a copy, `None` without one."""
    noted = note(tensor)
    if noted is None or not noted.is_weight:
        return None
    return tensor if noted.source is None else noted.source


def watching(original: Callable) -> Callable:
    """Returns the method by which a tape watches a tensor.

    Their gradient goes to themselves, not to what they were before a cast.
    """

    @functools.wraps(original)
    def watch(tape: Any, tensor: Any) -> None:
        for each in keras.tree.flatten(tensor):
            for name in (COPY, ANGLE):
                if note(each, name) is not None:
                    put_note(each, name, None)
        original(tape, tensor)

    return watch


def to_float32_with_notes(value: Any) -> Any:
    """Casts a 16-bit tensor to float32, and its logits; keeps its mask.

    Masked metrics and losses of softmax heads need both.
    """
    if float_dtype(value) not in ("float32", *_formats.SIXTEEN_BIT):
        return value
    # Float32 probabilities may have 16-bit logits, which are cast then.
    return copy_notes(value, to_float32(value), to_float32)


def note_cast(source: Any, converted: Any, tensor: Any) -> None:
    """Notes what a layer has cast, and copies the mask of its source."""
    noted_copy(tensor, converted, is_weight=False)
    layers.copy_mask(source, converted)  # Keras 3.12 loses it in a cast


def before_cast(x: Any) -> Any:
    """Returns a tensor as it was before a layer cast it, else the tensor."""
    noted = note(x)
    return x if noted is None or noted.is_weight else noted.source


def map_leaves(nest: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to the leaves of lists, tuples and dicts.

    Types are kept, and parts that do not change are returned as they are.
    """
    if not isinstance(nest, _NESTS):
        return function(nest)
    values = [*nest.values()] if isinstance(nest, dict) else nest
    # Most are leaves, and each op asks.
    mapped = [
        map_leaves(value, function)
        if isinstance(value, _NESTS)
        else function(value)
        for value in values
    ]
    if all(map(operator.is_, mapped, values)):
        return nest
    if hasattr(type(nest), "_fields"):
        return type(nest)(*mapped)
    if isinstance(nest, tuple):
        return tuple.__new__(type(nest), mapped)
    # A copy is made because the constructor may take other arguments.
    other = copy.copy(nest)
    keys = [*nest] if isinstance(nest, dict) else range(len(nest))
    for key, value in zip(keys, mapped, strict=True):
        other[key] = value
    return other


def floats(nest: Any) -> tuple[list, Callable[[list], Any]]:
    """Returns a nest's float arrays and those of its notes, as for a gate.

    It also returns the function that puts others in their place.
    """
    found: list = []

    def noted(array: Any) -> Any:
        if _is_float_array(array):
            found.append(array)
        return array

    def rebuilt(values: list) -> Any:
        new = iter(values)
        return _rebuilt(nest, lambda x: next(new) if _is_float_array(x) else x)

    _rebuilt(nest, noted)
    return found, rebuilt


def _rebuilt(nest: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to the leaves of a nest and their notes."""

    def rebuilt(leaf: Any) -> Any:
        if _ON_TENSORFLOW and isinstance(leaf, tf.__internal__.CompositeTensor):
            # These are ragged or sparse.
            return tf.nest.map_structure(function, leaf, expand_composites=True)
        return copy_notes(leaf, function(leaf), function)

    return map_leaves(nest, rebuilt)


def _is_float_array(value: Any) -> bool:
    kind: Any = type(value)
    return keras_variables.derives(kind, ARRAYS) and bool(float_dtype(value))
