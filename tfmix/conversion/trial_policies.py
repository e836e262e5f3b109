"""Which dtype policy each layer has while a model is checked."""

from collections.abc import Collection
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import layers as host
from tfmix.conversion import planned_policies as conversion
from tfmix.policy import policy as policies

FLOAT32 = "float32"
Plan = dict[Any, keras.DTypePolicy]


def sixteen_bit_layers(model: Any) -> list[Any]:
    """Returns the layers of a model that compute in 16 bit now."""
    return [
        layer
        for layer in host.flat_layers(model)
        if layer.compute_dtype in _formats.SIXTEEN_BIT
    ]


def reference(model: Any) -> Plan:
    """Plans float32 for every layer that computes in floats."""
    return {layer: keras.DTypePolicy(FLOAT32) for layer in _movable(model)}


def sixteen_bit(model: Any, policy: keras.DTypePolicy | None) -> Plan:
    """Plans what a model is trained under.

    Args:
        model: The model.
        policy: None for the model as it stands. A `Policy` does what
            `tfmix.apply_policy` does with it; any other policy goes to every
            layer but those a 16-bit model keeps in float32.

    Returns:
        A policy for every layer that computes in floats.
    """
    layers = _movable(model)
    if policy is None:
        return {layer: vars(layer)["_dtype_policy"] for layer in layers}
    if isinstance(policy, policies.Policy):
        # What `apply_policy` would do, so that a suggestion does the same.
        steps = {step.layer: step for step in conversion.plan(model, policy)}
        return {
            layer: steps[layer].policy for layer in layers if layer in steps
        }
    kept = _kept(model, layers)
    whole = policies.plain(policy)
    return {
        layer: keras.DTypePolicy(FLOAT32) if layer in kept else whole
        for layer in layers
    }


def dtype(plan: Plan, layer: Any) -> str:
    """Returns the compute dtype a plan has for a layer."""
    policy = plan.get(layer)
    if policy is None:
        return str(layer.compute_dtype)
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path]
    return str(policy.compute_dtype)


def _kept(model: Any, layers: Collection[Any]) -> set[Any]:
    """Returns the layers that the maker of a 16-bit model left in float32."""
    if not sixteen_bit_layers(model):
        return set()
    return {layer for layer in layers if layer.compute_dtype == FLOAT32}


def _movable(model: Any) -> list[Any]:
    return [
        layer
        for layer in host.flat_layers(model)
        if keras.backend.is_float_dtype(
            keras.backend.standardize_dtype(layer.compute_dtype)
        )
        and layer.quantization_mode is None
    ]
