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
import numpy as np

from tfmix import _bad_rows, _messages
from tfmix._keras import (
    global_state,
    graphs,
    layers,
    replacing,
    training,
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
    elif isinstance(layer, keras.layers.Masking):
        _use_converter(layer, _remember)
        call = functools.partial(_mask_exactly, layer)
        _wrap(layer, call=call, compute_mask=_compute_exact_mask)
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


def warn_of_rounded_data(args: tuple, kwargs: dict) -> None:
    """Warns once of whole numbers that `fit` gets in 16 bit.

    It looks at arrays only, on the host: at those of 16 bit, and at all float
    arrays if Keras casts them to 16 bit.
    """
    for name in ("x", "y"):
        data = replacing.argument(training.ORDERS["fit"], args, kwargs, name)
        for leaf in keras.tree.flatten(data):
            if not _bad_rows.is_array(leaf):
                continue
            dtype = keras.backend.standardize_dtype(leaf.dtype)
            if dtype not in _EXACT_UP_TO:
                dtype = keras.config.floatx()
            exact = _EXACT_UP_TO.get(dtype)
            if exact is not None and (largest := _largest_whole(leaf)) > exact:
                _messages.warn_once(
                    "`%s` reaches `fit` in %s, which holds only every second "
                    "whole number above %d, and it has numbers up to %d: ids "
                    "and labels may have changed. Pass them as integers.",
                    name,
                    dtype,
                    exact,
                    largest,
                )


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


def _largest_whole(leaf: Any) -> float:
    """Returns the largest size in an array of whole numbers, 0 for others."""
    largest = 0.0
    for _, block in _bad_rows.blocks(leaf):
        # Measurements end this at the first block.
        if not (np.trunc(block) == block).all():
            return 0.0
        largest = max(largest, float(np.abs(block).max(initial=0)))
    return largest


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
    _warn_of_rounded_ids(layer, _first_tensor(args, kwargs))
    return original(*args, **kwargs)


def _look_behind_casts(original: Callable, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tensors.map_leaves((args, kwargs), tensors.before_cast)
    return original(*args, **kwargs)


def _mask_exactly(
    layer: keras.layers.Masking,
    original: Callable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Masks by the exact inputs, as 16 bit may not hold the mask value."""
    inputs = _first_tensor(args, kwargs)
    args, kwargs = tensors.map_leaves((args, kwargs), tensors.before_cast)
    found = original(*args, **kwargs)
    result = keras.ops.cast(found, inputs.dtype)
    # Keras before 3.15 computes it later, from the rounded inputs.
    layers.put_mask(result, layer.compute_mask(inputs))
    return result


def _compute_exact_mask(
    original: Callable, inputs: Any, mask: Any = None
) -> Any:
    # A graph notes how to compute a mask from the given inputs.
    return original(tensors.before_cast(inputs), mask)


def _read_as_stored(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a layer that writes its weights back, and so reads in float32."""
    # Layers inside it have a dtype of their own.
    with keras_variables.autocast(None):
        return original(*args, **kwargs)


def _first_tensor(args: tuple, kwargs: dict) -> Any:
    leaves = keras.tree.flatten((args, kwargs))
    return next(leaf for leaf in leaves if hasattr(leaf, "dtype"))


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
