"""Gives new layers the active policy, with its rules."""

import functools
import re
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import layers
from tfmix.autocast import exact_inputs, fallback, record
from tfmix.policy import float32_layers
from tfmix.policy import policy as policies


def prepare(layer: keras.Layer, dtype: Any, policy: keras.DTypePolicy) -> None:
    """Gives a layer that was just initialized its part of the policy."""
    if not layers.takes_casts(layer):
        exact_inputs.keep_exact(layer)
    if dtype is None:
        layers.mark(layer, by_policy=True)
    if dtype is None or layer.dtype_policy.name == "float32":
        # A file stores the dtype that a rule chose, but not that of inner
        # layers.
        _apply_rules(layer, policy)
    if isinstance(dtype, policies.Policy):
        layers.set_policy(layer, policies.plain(dtype))
    if isinstance(layer, keras.Model):
        record.set_policy(layer, policy)
    if policies.is_sixteen_bit(policy) and not layers.is_structure(layer):
        fallback.attach(layer)


def is_chosen(layer: keras.Layer) -> bool:
    """Returns whether the policy chose a layer's dtype, not its user."""
    return layers.marks(layer).by_policy


def keep_float32(layer: keras.Layer) -> None:
    """Makes a layer, and inner layers without an own dtype, float32."""
    exact_inputs.make_float32(layer)
    _keep_inside_float32(layer)


def _keep_inside_float32(layer: keras.Layer) -> None:
    # `Bidirectional` runs copies made from the configuration of its layer, in
    # which every dtype looks as if the user had chosen it.
    copies = any(x.__name__ == "Bidirectional" for x in type(layer).__mro__)
    for inner in layers.flat_layers(layer)[1:]:
        chosen = copies or is_chosen(inner)
        if chosen and inner.compute_dtype != "float32":
            exact_inputs.make_float32(inner)


def _apply_rules(layer: keras.Layer, policy: keras.DTypePolicy) -> None:
    if policy.compute_dtype not in _formats.SIXTEEN_BIT:
        return
    # An entry of a map that may be meant for the layer decides its dtype. Paths
    # are not known yet; the part after the last slash is the name.
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and any(
        re.fullmatch(key.split("/")[-1], layer.name) for key in policy
    ):
        return
    ruled = policies.with_rules(policy)
    if ruled.why_float32(type(layer), layer.name):
        keep_float32(layer)
        # Inner layers are attached after this constructor, or in `build`.
        layers.until_built(layer, _keep_inside_float32)
    elif ruled.outside_white_list(type(layer)):
        layers.set_policy(layer, keras.DTypePolicy("float32"))
    elif float32_layers.needs_path(ruled.float32_layers):
        layers.until_built(layer, functools.partial(_apply_path_rules, ruled))


def _apply_path_rules(ruled: policies.Policy, layer: keras.Layer) -> None:
    path = layers.path_of(layer)
    if ruled.why_float32(type(layer), layer.name, path):
        keep_float32(layer)
