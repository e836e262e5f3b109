"""The active policy, and what a layer that is created gets of it.

There is one for the process, which a scope overrides in its thread.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfmix import _formats, _messages
from tfmix._keras import context, layers, replacing
from tfmix.autocast import layer_calls, record
from tfmix.policy import float32_layers
from tfmix.policy import policy as policies
from tfmix.policy.devices import is_on_tpu

_lock = threading.RLock()
# The policy of `set_global_policy`; `None` before its first call.
_base: keras.DTypePolicy | None = None
# The number of open scopes of all threads.
_scopes = 0
# Replaces each policy that a user sets, for all layers or for some. `None`
# keeps it.
_Decide = Callable[[keras.DTypePolicy, bool], keras.DTypePolicy]
_decide: _Decide | None = None


def decide_by(decide: _Decide) -> None:
    """Sets the function that replaces each policy that a user sets.

    Args:
        decide: A function that takes the policy, and whether it is for all new
            layers rather than for a block or one model.
    """
    global _decide
    _decide = decide


def resolve_policy(policy: Any, for_all: bool = False) -> keras.DTypePolicy:
    """Returns the policy that a user gets for a request."""
    accepted = accept(policy)
    return _decide(accepted, for_all) if _decide else accepted


def set_global_policy(policy: str | keras.DTypePolicy) -> None:
    """Sets the dtype policy of every layer created from now on.

    It is active in all threads and survives `keras.utils.clear_session()`.
    `"float32"` switches tfmix off: new layers are those of plain Keras. Until
    then, `compile` scales and guards every model whose layers compute in 16
    bit. This includes copies, loaded models and Keras's own, with or without a
    policy.

    Args:
        policy: A name (see `Policy`), a `Policy`, or any
            `keras.DTypePolicy`, maps and quantized policies included.

    Raises:
        TypeError: If `policy` is none of these.
        ValueError: If its name is unknown, its dtype is not a float, or it is
            float16 on a TPU, which cannot multiply it.
        RuntimeError: Inside a `policy_scope` of the same thread.

    Examples:
        >>> set_global_policy("mixed_bfloat16")
        >>> keras.layers.Dense(2).compute_dtype
        'bfloat16'
        >>> set_global_policy("float32")
    """
    global _base
    accepted = resolve_policy(policy, for_all=True)
    held = context.block.get().policies
    if held and held[0] is not _base:
        raise RuntimeError(
            "Inside `policy_scope` the policy of the scope holds. Received: "
            f"set_global_policy({policy!r}). Open another scope inside, or set "
            "the policy after this one has ended."
        )
    with _lock:
        _base = accepted
        _hold(None)
        if accepted.name == "float32":
            context.make_float32()
        _refresh(0)
        if accepted.name == "float32" and not _scopes:
            replacing.want(replacing.COMPILE, False)


def global_policy() -> keras.DTypePolicy:
    """Returns the dtype policy new layers get, rules included.

    Returns:
        The policy that `set_global_policy` or `policy_scope` got, with names as
        a `Policy`; Keras's own policy while tfmix is off.

    Examples:
        >>> with policy_scope("mixed_float16"):
        ...     global_policy()
        Policy('mixed_float16')
    """
    if hooks_keras():
        policy = _lookup()
        if policy is not None:
            return policy
    current = keras.config.dtype_policy()
    if _base is not None and _base.name == current.name == "float32":
        return _base
    return current


@contextlib.contextmanager
def policy_scope(
    policy: str | keras.DTypePolicy,
) -> Iterator[keras.DTypePolicy]:
    """Context (or decorator) in which new layers get another dtype policy.

    It holds in its own thread, and the policy before it is restored on exit,
    also after an exception. A thread that builds models has a scope of its own,
    or the policy of `set_global_policy`.

    Args:
        policy: As for `set_global_policy`.

    Raises:
        TypeError, ValueError: As `set_global_policy`.

    Examples:
        >>> with policy_scope("mixed_float16"):
        ...     layer = keras.layers.Dense(2)
        >>> layer.compute_dtype, keras.layers.Dense(2).compute_dtype
        ('float16', 'float32')
    """
    accepted = resolve_policy(policy)
    with contextlib.ExitStack() as undo:
        undo.callback(_refresh, -1)
        _refresh(1)
        undo.enter_context(replacing.block(policies.rules_of(accepted)))
        undo.enter_context(context.holding(policies=(accepted,)))
        yield accepted


def accept(policy: Any) -> keras.DTypePolicy:
    """Checks a policy that a user gave, and makes a `Policy` of a name."""
    if not isinstance(policy, keras.DTypePolicy):
        policy = policies.Policy(policy)
    if policy.compute_dtype == "float16" and is_on_tpu():
        raise ValueError(
            "A TPU has no float16 products: XLA refuses to compile them. "
            f"Received: policy={policy.name!r}. Take 'mixed_bfloat16', which "
            "needs no loss scaling either."
        )
    for dtype in (policy.compute_dtype, policy.variable_dtype):
        if not keras.backend.is_float_dtype(dtype):
            raise ValueError(
                "A policy for layers must have float dtypes, such as "
                f"'mixed_float16'. Received: policy={policy!r}, with {dtype!r}."
            )
    return policy


def _are_equal(before: keras.DTypePolicy, policy: keras.DTypePolicy) -> bool:
    """Returns whether a policy that Keras was given means one before it."""
    if before is policy:
        return True
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        # Keras's `==` fails on maps.
        return False
    has_rules = isinstance(policy, policies.Policy)
    return bool((before if has_rules else policies.plain(before)) == policy)


def _policies() -> tuple[keras.DTypePolicy, ...]:
    """Returns tfmix's policy, and one that Keras has set in its place.

    Keras's `set_dtype_policy` sets the policy of one thread, and packages set
    it for a moment.
    """
    held = context.block.get().policies
    return held or (() if _base is None else (_base,))


def _hold(held: tuple[keras.DTypePolicy, ...] | None) -> None:
    """Sets the policies of this thread until the block around it ends."""
    now = context.block.get()
    context.block.set(dataclasses.replace(now, policies=held))


def _lookup() -> keras.DTypePolicy | None:
    return next(reversed(_policies()), None)


def _refresh(opened: int) -> None:
    """Updates Keras for the active policies, and for scopes that opened."""
    global _scopes
    with _lock:
        _scopes += opened
        replacing.install(policies.rules_of(_base))
        is_16_bit = _base is not None and _base.name != "float32"
        is_on = is_16_bit or bool(_scopes)
        replacing.want(replacing.LAYERS, is_on)
        if is_on:
            replacing.want(replacing.COMPILE, True)


def _replaced_by_keras(policy: keras.DTypePolicy) -> bool:
    """Follows Keras's `set_dtype_policy`; returns whether tfmix is on."""
    if not (known := _policies()) or not hooks_keras():
        # Other code may have wrapped the attribute, and call our function.
        return False
    own = known[0]
    if not _are_equal(own, policy):
        policy = resolve_policy(policy, for_all=True)
    if _are_equal(own, policy):
        _hold((own,))
        return True
    _hold((own, policy))
    _messages.warn_once(
        "keras.config.set_dtype_policy(%r) replaces tfmix's policy %r in "
        "this thread until it is set back. If you mean it, call "
        "tfmix.set_global_policy(%r) instead.",
        policy.name,
        own,
        policy.name,
        about=("set_dtype_policy", policy.name, own.name),
    )
    return True


def hooks_keras() -> bool:
    """Returns whether Keras gets its policy from tfmix now."""
    return replacing.is_wanted(replacing.LAYERS)


def policy_store(store: types.ModuleType) -> types.ModuleType:
    """Returns what makes Keras get its policy from tfmix."""

    def get(name: str, *args: Any, **kwargs: Any) -> Any:
        policy = _lookup() if name == context.POLICY_KEY else None
        if policy is None:
            return store.get_global_attribute(name, *args, **kwargs)
        return policies.plain(policy)

    def set(name: str, value: Any) -> None:
        is_policy = name == context.POLICY_KEY and value is not None
        if not (is_policy and _replaced_by_keras(value)):
            store.set_global_attribute(name, value)

    functions = {"get_global_attribute": get, "set_global_attribute": set}
    return replacing.copy_module(store, functions)


def initializer(original: Callable) -> Callable:
    """Returns the constructor of all layers."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        policy = _lookup()
        if policy is not None:
            _prepare(self, kwargs, policy)

    # Keras makes configurations out of constructors' arguments, with two
    # readers of signatures. One of them does not look through wrappers.
    vars(__init__)["__signature__"] = inspect.signature(original)
    return __init__


def _prepare(
    layer: keras.Layer, kwargs: dict[str, Any], policy: keras.DTypePolicy
) -> None:
    """Gives a layer that was just initialized its part of the policy."""
    dtype = kwargs.get("dtype")
    layers.mark(layer, origin=layers.origin_of(kwargs))
    if dtype is None or layer.dtype_policy.name == "float32":
        # A file stores the dtype that a rule chose, but not that of inner
        # layers.
        _apply_rules(layer, policy)
    if isinstance(dtype, policies.Policy):
        layers.set_policy(layer, policies.plain(dtype))
    if isinstance(layer, keras.Model):
        record.set_policy(layer, policy)
    if policies.is_sixteen_bit(policy) or not layers.takes_casts(layer):
        layer_calls.attach(layer)


def _keep_float32(layer: keras.Layer) -> None:
    """Makes a layer, and inner layers without an own dtype, float32."""
    layer_calls.make_float32(layer)
    _keep_inside_float32(layer)


def _keep_inside_float32(layer: keras.Layer) -> None:
    # `Bidirectional` runs copies made from the configuration of its layer, in
    # which every dtype looks as if the user had chosen it.
    copies = any(x.__name__ == "Bidirectional" for x in type(layer).__mro__)
    for inner in layers.flat_layers(layer)[1:]:
        chosen = copies or layers.marks(inner).origin == layers.DEFAULT
        if chosen and inner.compute_dtype != "float32":
            layer_calls.make_float32(inner)


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
        _keep_float32(layer)
        # Inner layers are attached after this constructor, or in `build`.
        layers.until_built(layer, _keep_inside_float32)
    elif ruled.outside_white_list(type(layer)):
        layers.set_policy(layer, keras.DTypePolicy("float32"))
    elif float32_layers.needs_path(ruled.float32_layers):
        layers.until_built(layer, functools.partial(_apply_path_rules, ruled))


def _apply_path_rules(ruled: policies.Policy, layer: keras.Layer) -> None:
    path = layers.path_of(layer)
    if ruled.why_float32(type(layer), layer.name, path):
        _keep_float32(layer)
