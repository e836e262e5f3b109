"""Finds the layers of a model that compute, and the dtypes they use."""

import keras

from tfmix import _formats
from tfmix._keras import layers


def layers_that_compute(model: keras.Layer) -> list[keras.Layer]:
    """Lists the layers of a model that compute something, at any depth.

    Functional and Sequential models only connect layers, whatever their own
    dtype policy is; a subclassed model may compute in its `call`.
    """
    return [x for x in layers.called(model) if not layers.is_structure(x)]


def computes_in(model: keras.Layer, dtype: str) -> bool:
    """Returns whether a layer of a model computes in a dtype."""
    return any(
        layer.compute_dtype == dtype for layer in layers_that_compute(model)
    )


def has_sixteen_bit_variables(model: keras.Layer) -> bool:
    """Returns whether a model has, or will have, 16-bit variables."""
    return any(
        layer.variable_dtype in _formats.SIXTEEN_BIT
        for layer in layers_that_compute(model)
    )
