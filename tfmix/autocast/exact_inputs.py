"""Gives layers such as Embedding their inputs as they were before a cast.

Keras casts the float inputs of a subclassed layer to 16 bit before its `call`.
Ids then reach an `Embedding` rounded (2049 becomes 2048), and raw features lose
digits before a `Normalization`. So each cast notes its input on the tensor, and
these layers use that.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras

from tfmix import _messages
from tfmix._keras import (
    global_state,
    graphs,
    layers,
    replacing,
)
from tfmix._keras import variables as keras_variables
from tfmix.ops import tensors

_CONVERT = "convert_input"
# Larger whole numbers are not exact: 2 to the number of significant bits.
_EXACT_UP_TO = {"float16": 2048, "bfloat16": 256}


def keep_exact(layer: keras.Layer) -> None:
    """Makes a layer note what it casts, or use the notes of other layers."""
    if isinstance(layer, keras.layers.Embedding):
        _wrap(layer, call=functools.partial(_look_up, layer))
    elif isinstance(layer, layers.DATA_LAYER):
        look_behind_casts(layer)
        # Some of them turn off the conversion of their inputs, and all of them
        # do in a graph of TensorFlow, such as a data pipeline.
        _wrap(layer, call=_look_behind_casts)
    elif isinstance(layer, keras.Sequential):
        # Each of its layers casts its own inputs.
        _use_converter(layer, _pass_on)
    elif layer.dtype_policy.compute_dtype == "float32":
        look_behind_casts(layer)
    elif isinstance(layer, keras.layers.SpectralNormalization):
        _wrap(layer, call=_read_as_stored)
    elif not layers.takes_casts(layer):
        _use_converter(layer, _remember)


def begin_exact(model: keras.Model) -> None:
    """Passes exact inputs from a Sequential to a model at its beginning."""
    is_sequential = isinstance(model, keras.Sequential) and model.layers
    # Keras has created its input by then, with the first model's shape.
    if is_sequential and hasattr(model.layers[0], "input_shape"):
        graphs.widen_inputs(model)


def build_exactly(
    model: keras.Sequential, build: Callable, *args: Any, **kwargs: Any
) -> None:
    """Builds a Sequential whose input rounds no ids and no raw features.

    Without an `Input` of the user's, Keras creates one in 16 bit.
    """
    first = layers.own_layers(model)[:1]
    build(*args, **kwargs)
    if not layers.is_input(first[0]):
        graphs.widen_inputs(model)


def make_float32(layer: keras.Layer) -> None:
    """Makes a layer compute in float32, on inputs before any cast."""
    layers.set_policy(layer, keras.DTypePolicy("float32"))
    look_behind_casts(layer)


def look_behind_casts(layer: keras.Layer) -> None:
    """Gives a float32 layer its inputs as they were before a cast."""
    _use_converter(layer, _recover)


def forget_exact(layer: keras.Layer) -> None:
    """Undoes `keep_exact`."""
    policy = layer.dtype_policy
    if _CONVERT in vars(policy):
        layers.set_policy(layer, keras.DTypePolicy(policy.name))
    replacing.detach(layer, replacing.EXACT)


def _use_converter(layer: keras.Layer, convert: Callable) -> None:
    """Gives the layer a policy of its own with another `convert_input`."""
    policy = layer.dtype_policy
    original = functools.partial(type(policy).convert_input, policy)
    convert = functools.partial(convert, original)
    layers.change_policy(layer, **{_CONVERT: convert})


# These convert an input of a layer, by Keras's `convert_input`.


def _remember(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Notes on what a layer casts what it was before."""
    x = keras_variables.read(x)
    tensor = original(x, False, dtype)
    converted = original(tensor, autocast, dtype)
    if converted is not tensor:
        tensors.note_cast(x, converted, tensor)
    return converted


def _recover(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Gives a layer what it gets as it was before another layer cast it."""
    exact = tensors.before_cast(x)
    converted = original(exact, autocast, dtype)
    if converted is not exact:
        layers.copy_mask(exact, converted)
    return converted


def _pass_on(original: Callable, x: Any, autocast: bool, dtype: str) -> Any:
    """Gives a layer, which casts nothing, what it gets as it was before."""
    return original(tensors.before_cast(x), False, dtype)


class _Exact(NamedTuple):
    """The part of a layer that sees its inputs before a cast."""

    wrappers: Mapping[str, replacing.Wrapper]


def _wrap(layer: keras.Layer, **wrappers: replacing.Wrapper) -> None:
    replacing.attach(layer, replacing.EXACT, _Exact(wrappers))


def _look_up(
    layer: keras.layers.Embedding,
    original: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    args, kwargs = tensors.map_leaves((args, kwargs), tensors.before_cast)
    leaves = keras.tree.flatten((args, kwargs))
    ids = next(leaf for leaf in leaves if hasattr(leaf, "dtype"))
    _warn_of_rounded_ids(layer, ids)
    return original(*args, **kwargs)


def _look_behind_casts(original: Callable, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tensors.map_leaves((args, kwargs), tensors.before_cast)
    return original(*args, **kwargs)


def _read_as_stored(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer that writes its weights back, and so reads in float32."""
    # Layers inside it have a dtype of their own.
    with keras_variables.autocast(None):
        return original(*args, **kwargs)


def _warn_of_rounded_ids(layer: keras.layers.Embedding, ids: Any) -> None:
    dtype = keras.backend.standardize_dtype(ids.dtype)
    exact = _EXACT_UP_TO.get(dtype)
    if exact is None or global_state.on_shapes_only():
        return
    if layer.input_dim <= exact:
        return
    # A model runs this only while it is traced, so a few times, not each step.
    _messages.warn(
        "ids reach Embedding %r as %s, which rounds whole numbers "
        "above %d, and it has %d rows. Feed ids as integers, or slice and "
        "cast them to 'int32' in a layer made with autocast=False.",
        layer.name,
        dtype,
        exact,
        layer.input_dim,
    )
