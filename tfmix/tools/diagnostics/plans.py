"""The policies that a check assumes for the layers of a model."""

import keras

from tfmix import _formats
from tfmix._keras import layers
from tfmix.conversion import planned_policies

Plan = dict[keras.Layer, keras.DTypePolicy]


def sixteen_bit_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model that compute in 16 bit now."""
    return [
        layer
        for layer in layers.flat_layers(model)
        if layer.compute_dtype in _formats.SIXTEEN_BIT
    ]


def reference(model: keras.Model) -> Plan:
    """Plans float32 for every layer that computes in floats.

    Quantized layers keep their integers, and compute the rest in float32.
    """
    return {
        layer: _in_float32(planned_policies.entry(layer.dtype_policy, layer))
        for layer in _movable(model)
    }


def _in_float32(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    if policy.quantization_mode is None:
        return keras.DTypePolicy("float32")
    config = {**policy.get_config(), "source_name": "float32"}
    return type(policy).from_config(config)


def sixteen_bit(model: keras.Model, policy: keras.DTypePolicy | None) -> Plan:
    """Plans the policies of training, for layers that compute in floats.

    They are those of `apply_policy`. With `None`, layers keep their policies.
    """
    movable = _movable(model)
    if policy is None:
        return {layer: layers.own_policy(layer) for layer in movable}
    planned = {
        step.layer: step.policy for step in planned_policies.plan(model, policy)
    }
    return {layer: planned[layer] for layer in movable if layer in planned}


def dtype(planned: Plan, layer: keras.Layer) -> str:
    """Returns the compute dtype a plan has for a layer."""
    policy = planned.get(layer)
    if policy is None:
        return str(layer.compute_dtype)
    return str(planned_policies.entry(policy, layer).compute_dtype)


def _movable(model: keras.Model) -> list[keras.Layer]:
    return [
        layer
        for layer in layers.flat_layers(model)
        if keras.backend.is_float_dtype(
            keras.backend.standardize_dtype(layer.compute_dtype)
        )
    ]
