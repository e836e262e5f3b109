"""Which dtype policy each layer has while a model is checked."""

import keras

from tfmix import _formats
from tfmix._keras import layers as host
from tfmix.conversion import planned_policies as conversion
from tfmix.policy import policy as policies

FLOAT32 = "float32"
Plan = dict[keras.Layer, keras.DTypePolicy]


def sixteen_bit_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model that compute in 16 bit now."""
    return [
        layer
        for layer in host.flat_layers(model)
        if layer.compute_dtype in _formats.SIXTEEN_BIT
    ]


def reference(model: keras.Model) -> Plan:
    """Plans float32 for every layer that computes in floats."""
    return {layer: keras.DTypePolicy(FLOAT32) for layer in _movable(model)}


def sixteen_bit(model: keras.Model, policy: keras.DTypePolicy | None) -> Plan:
    """Plans what a model is trained under, for layers that compute in floats.

    `None` is the model as it stands. A `Policy` does what `apply_policy` does
    with it; any other policy goes to every layer but those which the maker of
    a 16-bit model left in float32.
    """
    layers = _movable(model)
    if policy is None:
        return {layer: vars(layer)["_dtype_policy"] for layer in layers}
    if isinstance(policy, policies.Policy):
        steps = {step.layer: step for step in conversion.plan(model, policy)}
        return {
            layer: steps[layer].policy for layer in layers if layer in steps
        }
    mixed, whole = bool(sixteen_bit_layers(model)), policies.plain(policy)
    return {
        layer: keras.DTypePolicy(FLOAT32)
        if mixed and layer.compute_dtype == FLOAT32
        else whole
        for layer in layers
    }


def dtype(plan: Plan, layer: keras.Layer) -> str:
    """Returns the compute dtype a plan has for a layer."""
    policy = plan.get(layer)
    if policy is None:
        return str(layer.compute_dtype)
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path]
    return str(policy.compute_dtype)


def _movable(model: keras.Model) -> list[keras.Layer]:
    return [
        layer
        for layer in host.flat_layers(model)
        if keras.backend.is_float_dtype(
            keras.backend.standardize_dtype(layer.compute_dtype)
        )
        and layer.quantization_mode is None
    ]
