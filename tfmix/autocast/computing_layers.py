"""The layers of a model that compute, and the dtypes they do it in."""

import keras

from tfmix import _formats
from tfmix._keras import layers
from tfmix.autocast import own_code


def layers_that_compute(model: keras.Layer) -> list[keras.Layer]:
    """Lists the layers of a model that compute something, at any depth.

    Functional and Sequential models only pass tensors on, whatever their own
    dtype policy says; a subclassed model may compute in its `call`.
    """
    return [
        layer
        for layer in layers.called(model)
        if not layers.is_structure(layer)
    ]


def computes_in(model: keras.Layer, dtype: str) -> bool:
    """Says whether any layer of a model computes, or returns, in a dtype."""
    return any(
        dtype in (layer.compute_dtype, own_code.returned_dtype(layer))
        for layer in layers_that_compute(model)
    )


def has_sixteen_bit_variables(model: keras.Layer) -> bool:
    """Says whether a model keeps, or will keep, variables in 16 bit."""
    return any(
        layer.variable_dtype in _formats.SIXTEEN_BIT
        for layer in layers_that_compute(model)
    )
