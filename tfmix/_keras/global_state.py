"""Keras's global state: its policy, the running call, notes on tensors.

Keras keeps its policy per thread, and `clear_session()` drops it. Its functions
`dtype_policy` and `set_dtype_policy` look up in one module what reads and
writes it. Giving them a copy of that module reaches every thread and every
caller, and leaves alone all else that Keras keeps there.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common import (
    global_state,
    stateless_scope,
    symbolic_scope,
    tensor_attributes,
    variables,
)
from keras.src.dtype_policies import dtype_policy

POLICY_KEY = "dtype_policy"
# The module by which Keras's two functions read and write the policy.
POLICY_STORE = (dtype_policy, "global_state")
_CALL_CONTEXT = "current_call_ctx"


def policy_name() -> str:
    """Returns the name of Keras's own policy in the calling thread."""
    own = getattr(global_state.GLOBAL_STATE_TRACKER, POLICY_KEY, None)
    return keras.config.floatx() if own is None else str(own.name)


def make_float32() -> None:
    """Sets Keras's own policy of this thread to float32."""
    if policy_name() != "float32":
        tracker = global_state.GLOBAL_STATE_TRACKER
        setattr(tracker, POLICY_KEY, keras.DTypePolicy("float32"))


# Returns whether Keras infers shapes, on symbols that keep no notes.
on_shapes_only: Callable[[], bool] = symbolic_scope.in_symbolic_scope


def entry_layer() -> keras.Layer | None:
    """Returns the outermost layer whose call is running."""
    context = global_state.get_global_attribute(_CALL_CONTEXT)
    # `stateless_call` runs `call` without a context.
    entry: keras.Layer | None = getattr(context, "entry_layer", None)
    return entry


def is_outermost(layer: keras.Layer) -> bool:
    """Returns whether no other layer called this one, and tensors are real."""
    return entry_layer() in (None, layer) and not on_shapes_only()


def call_state() -> tuple[Any, Any, Any]:
    """Returns the training mode, layer and dtype of the running call.

    The layer is a weak reference.
    """
    context = global_state.get_global_attribute(_CALL_CONTEXT)
    entry = None
    if context is not None:
        entry = weakref.ref(context.entry_layer)
        context = _with_entry(context, None)
    return context, entry, variables.get_autocast_scope()


def is_training() -> bool:
    """Returns whether the running call is in training mode."""
    context = global_state.get_global_attribute(_CALL_CONTEXT)
    return bool(getattr(context, "training", None))


def _with_entry(context: Any, entry: Any) -> Any:
    """Returns the context of a call that another layer began."""
    other = type(context)(entry)
    vars(other).update({**vars(context), "entry_layer": entry})
    return other


@contextlib.contextmanager
def as_called(state: tuple[Any, Any, Any]) -> Iterator[None]:
    """Runs a block as part of an earlier call, given its `call_state`."""
    context, entry, scope = state
    if context is not None:
        context = _with_entry(context, entry())
    before = global_state.get_global_attribute(_CALL_CONTEXT)
    global_state.set_global_attribute(_CALL_CONTEXT, context)
    try:
        with variables.AutocastScope(getattr(scope, "dtype", None)):
            yield
    finally:
        global_state.set_global_attribute(_CALL_CONTEXT, before)


# Returns the `keras.StatelessScope` around the caller, if there is one.
open_scope: Callable[[], keras.StatelessScope | None] = (
    stateless_scope.get_stateless_scope
)


def open_scopes() -> Iterator[keras.StatelessScope]:
    """Yields each `keras.StatelessScope` around, from the innermost."""
    scope = open_scope()
    while scope is not None:
        yield scope
        scope = scope.original_scope


def noted_scope(scope: Any) -> Callable[[], None]:
    """Notes what a scope holds; returns a function that restores it."""
    mapping, losses = dict(scope.state_mapping), list(scope.losses)

    def restore() -> None:
        scope.state_mapping, scope.losses = dict(mapping), list(losses)

    return restore


# Losses and metrics of Keras read these attributes of a tensor.
LOGITS, MASK = "_keras_logits", "_keras_mask"
# TensorFlow's tensors hold their attributes themselves; Keras keeps those of
# JAX's arrays.
get_attribute: Callable[[Any, str], Any] = tensor_attributes.get_tensor_attr
set_attribute: Callable[[Any, str, Any], None] = (
    tensor_attributes.set_tensor_attr
)
