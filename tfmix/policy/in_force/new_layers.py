"""What a new layer gets from the policy in force, rules applied.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1.
"""

import re
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _formats
from tfmix.policy import layer_rules
from tfmix.policy import policy as policies
from tfmix.policy.in_force import carried, uncast_inputs

# Set on layers whose dtype the policy chose; the user's own is never touched.
_CHOSEN = "_tfmix_chose_dtype"
# `Layer.__call__` starts with this method, before it casts its inputs. An
# instance attribute of that name is a hook for one layer, not for a class.
_FIRST_CALLED = "_check_super_called"


def settle(layer: Any, dtype: Any, policy: keras.DTypePolicy) -> None:
    """Gives a layer that was just initialised what the policy says.

    Args:
        layer: The layer, `Layer.__init__` done.
        dtype: What its `dtype` argument was; not `None` means that the user
            chose, and wins.
        policy: The policy in force.
    """
    if dtype is None:
        put(layer, _CHOSEN, True)
        uncast_inputs.keep_exact(layer)
        _apply_rules(layer, policy)
    else:
        uncast_inputs.keep_exact(layer)
    if isinstance(dtype, policies.Policy):
        set_dtype(layer, policies.plain(dtype))
    if isinstance(layer, keras.Model):
        carried.carry(layer, policy)


def put(layer: Any, name: str, value: Any) -> None:
    """Sets an attribute without Keras tracking it as state."""
    object.__setattr__(layer, name, value)


def is_chosen(layer: Any) -> bool:
    """Says whether a layer's dtype came from the policy, not from its user."""
    return bool(vars(layer).get(_CHOSEN))


def keep_float32(layer: Any) -> None:
    """Makes a layer, and what it holds without a dtype of its own, float32."""
    _make_float32(layer)
    _keep_inside_float32(layer)


def set_dtype(layer: Any, policy: keras.DTypePolicy) -> None:
    """Sets a layer's policy as it is given.

    Keras's own setter would write into the map, if the layer has one, and the
    map is the user's.
    """
    put(layer, "_dtype_policy", policy)


def _make_float32(layer: Any) -> None:
    set_dtype(layer, keras.DTypePolicy("float32"))
    uncast_inputs.look_behind_casts(layer)


def _keep_inside_float32(layer: Any) -> None:
    # `Bidirectional` runs copies made from the configuration of the layer it
    # was given, in which every dtype looks as if the user had chosen it.
    names = {base.__name__ for base in type(layer).__mro__}
    copies = "Bidirectional" in names
    for inner in layer._flatten_layers(include_self=False):
        chosen = copies or is_chosen(inner)
        if chosen and inner.compute_dtype != "float32":
            _make_float32(inner)


def _apply_rules(layer: Any, policy: keras.DTypePolicy) -> None:
    if policy.compute_dtype not in _formats.SIXTEEN_BIT:
        return
    ruled = policies.with_rules(policy)
    if _named_in_map(layer, policy):
        return
    if ruled.why_float32(type(layer), layer.name):
        keep_float32(layer)
        # What it holds is attached after this constructor, or in `build`.
        _before_first_call(layer, _keep_inside_float32)
    elif ruled.outside_white_list(type(layer)):
        set_dtype(layer, keras.DTypePolicy("float32"))
    elif layer_rules.needs_path(ruled.float32_layers):
        _before_first_call(layer, _apply_path_rules(ruled))


def _named_in_map(layer: Any, policy: keras.DTypePolicy) -> bool:
    """Says whether a map has an entry that may be meant for the layer."""
    if not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return False
    # Paths are not known yet; the part after the last slash is the name.
    return any(re.fullmatch(key.split("/")[-1], layer.name) for key in policy)


def _apply_path_rules(ruled: policies.Policy) -> Callable[[Any], None]:
    def apply(layer: Any) -> None:
        if ruled.why_float32(type(layer), layer.name, path_of(layer)):
            keep_float32(layer)

    return apply


def path_of(layer: Any) -> str:
    """Returns a layer's path, also before its first call has set it."""
    if layer.path:
        return str(layer.path)
    from keras.src.backend.common import name_scope

    parent = layer._parent_path
    if parent is None:
        parent = name_scope.current_path()
    return f"{parent}/{layer.name}" if parent else str(layer.name)


def _before_first_call(layer: Any, action: Callable[[Any], None]) -> None:
    """Runs `action(layer)` whenever a layer is used until it is built."""
    if not hasattr(layer, _FIRST_CALLED):
        raise RuntimeError(
            "tfmix does not fit this version of Keras: layers have no "
            f"{_FIRST_CALLED!r}. Install Keras 3.12 to 3.15."
        )
    original = getattr(type(layer), _FIRST_CALLED)
    busy: list[bool] = []

    def check() -> None:
        original(layer)
        if busy:
            return
        busy.append(True)
        try:
            action(layer)
        finally:
            busy.pop()
        if layer.built and layer._called:
            vars(layer).pop(_FIRST_CALLED, None)

    put(layer, _FIRST_CALLED, check)
