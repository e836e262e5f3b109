"""What the running code is part of: settings, a call of Keras's, a trace.

The settings of tfmix hold inside a `with` block and everything it calls. Each
thread has its own record, so other threads do not see it.

Keras keeps its policy per thread, and `clear_session()` drops it. Its functions
`dtype_policy` and `set_dtype_policy` look up in one module what reads and
writes it. Giving them a copy of that module reaches every thread and every
caller, and leaves alone all else that Keras keeps there.
"""

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import keras
from keras.src.backend.common import (
    global_state,
    stateless_scope,
    symbolic_scope,
    tensor_attributes,
    variables,
)
from keras.src.dtype_policies import dtype_policy

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    TRACER: Any = None
else:
    import jax
    import jax.extend.core
    from keras.src.backend.jax import trainer

    TRACER = jax.core.Tracer
    # Keras's trainer imported its own reference when Keras was imported.
    JIT = ((jax, "jit"), (trainer, "jit"))

Function = TypeVar("Function", bound=Callable)


@dataclasses.dataclass(frozen=True)
class Block:
    """The settings of the running code.

    Attributes:
        rules: The active op rules; `None` for those that are installed.
        policies: The policy of new layers, and one that Keras has set in its
            place; `None` for that of the process.
        around: What the running model call is part of, `None` if of nothing.
        gates: The gates of the model's call that runs, `None` if there are
            none.
        power: The power of two of the gradients that are formed now, `None`
            if they are unscaled.
        in_loop: Whether the code runs in each step of a loop.
        in_map: Whether TensorFlow converts the code to run for all rows.
        users_code: The dtype of the user's code that is running, else "". In
            "16 bit" it is tried, and falls back to float32 if that fails. To
            code in "float32" the layers that it calls return float32.
        takes_unscaled: Whether an `apply_gradients` around gets gradients that
            are not scaled.
        step: The train step that is running, `None` if there is none.
    """

    rules: frozenset[str] | None = None
    policies: tuple[keras.DTypePolicy, ...] | None = None
    around: Any = None
    gates: Any = None
    power: Any = None
    in_loop: bool = False
    in_map: bool = False
    users_code: str = ""
    takes_unscaled: bool = False
    step: Any = None


_NOTHING = Block()
# tfmix's own code casts explicitly.
NO_RULES: frozenset[str] = frozenset()
# `block.get()` returns the caller's settings.
block = contextvars.ContextVar("tfmix_block", default=_NOTHING)


class _Installed:
    # These hold outside of blocks.
    rules = NO_RULES


installed = _Installed()


def active_rules() -> frozenset[str]:
    """Returns the rules of the caller's block, or the installed ones."""
    own = block.get().rules
    return installed.rules if own is None else own


class holding(contextlib.AbstractContextManager[None]):
    """Changes some settings for a block.

    Layers enter it in each eager call, so it is no generator, and fields that
    do not change are not set one by one.

    Args:
        **values: New values by the names of `Block`; others stay.
    """

    def __init__(self, **values: Any) -> None:
        self._values = values

    def __enter__(self) -> None:
        self._outside = block.get()
        inside = object.__new__(Block)
        vars(inside).update(vars(self._outside), **self._values)
        block.set(inside)

    def __exit__(self, *_: object) -> None:
        block.set(self._outside)


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


# Losses and metrics of Keras read these attributes of a tensor.
LOGITS, MASK = "_keras_logits", "_keras_mask"
# TensorFlow's tensors hold their attributes themselves; Keras keeps those of
# JAX's arrays.
get_attribute: Callable[[Any, str], Any] = tensor_attributes.get_tensor_attr
set_attribute: Callable[[Any, str, Any], None] = (
    tensor_attributes.set_tensor_attr
)

# The platform that a step is only compiled for, or "".
_platform = contextvars.ContextVar("tfmix_platform", default="")
# `trace` returns this for code that is not traced.
EAGER = "eager"


def by_xla() -> bool:
    """Returns whether the traced code becomes part of an XLA program."""
    # If TensorFlow does not know, "no" is the safe answer: slower, but correct.
    if keras.backend.backend() != "tensorflow":
        return True
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = getattr(graph, "_get_control_flow_context", lambda: None)()
        while context is not None:
            if getattr(context, "IsXLAContext", lambda: None)():
                return True
            context = getattr(context, "outer_context", None)
        graph = getattr(graph, "outer_graph", None)
    return False


def in_graph_without_xla() -> bool:
    """Returns whether TensorFlow traces a graph for its own kernels."""
    if keras.backend.backend() != "tensorflow" or tf.executing_eagerly():
        return False
    return not by_xla()


@contextlib.contextmanager
def compiled_for(platform: str) -> Iterator[None]:
    """Sets the platform that a block is traced for: "tpu", "cuda"."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def for_tpu() -> bool:
    """Returns whether TensorFlow is known to trace for a TPU."""
    strategy = type(tf.distribute.get_strategy()).__name__
    return _platform.get() == "tpu" or "TPU" in strategy


def for_gpu(tensor: Any = None) -> bool:
    """Returns whether TensorFlow traces for an NVIDIA GPU.

    Args:
        tensor: An operand, which may lie on a CPU.
    """
    platform = _platform.get()
    if platform:
        return platform == "cuda"
    if not tf.test.is_built_with_cuda():
        return False
    on_cpu = tensor is not None and "CPU" in tensor.device
    return not on_cpu and bool(tf.config.list_logical_devices("GPU"))


def by_gpu_kernels(tensor: Any = None) -> bool:
    """Returns whether TensorFlow's own GPU kernels run the code, without XLA.

    Args:
        tensor: An operand, as for `for_gpu`.
    """
    if keras.backend.backend() != "tensorflow":
        return False
    return for_gpu(tensor) and not by_xla()


def trace() -> Any:
    """Returns a token that equals itself only within one compiled function.

    It is `EAGER` if nothing is compiled, also inside `jax.grad`.
    """
    if keras.backend.backend() == "jax":
        # A transformation such as `jax.grad` does not trace constants.
        constant = jax.numpy.zeros(())
        if not is_symbolic(constant):
            return EAGER
        return weakref.ref(constant._trace)
    if tf.executing_eagerly():
        return EAGER
    return weakref.ref(tf.compat.v1.get_default_graph())


def is_made_in(function: Any, tensor: Any) -> bool:
    """Returns whether a tensor belongs to the function of a `trace` token.

    A tensor of a function that is traced inside it, such as the body of a loop,
    does not.
    """
    if keras.backend.backend() == "jax":
        return not is_symbolic(tensor) or function == weakref.ref(tensor._trace)
    return hasattr(tensor, "numpy")


def traced_with(others: Iterable, groups: Iterable[list]) -> list[bool]:
    """Returns whether JAX traces an array of each group with one of others."""
    traces = {id(getattr(other, "_trace", None)) for other in others}
    traces.discard(id(None))
    return [
        any(id(getattr(x, "_trace", None)) in traces for x in group)
        for group in groups
    ]


def is_differentiated(array: Any) -> bool:
    """Returns whether JAX differentiates by an array around a running rule."""
    return hasattr(array, "tangent")


def transformation() -> Any:
    """Returns a token of the running trace or transformation, such as `vmap`.

    It is `None` in versions of JAX that do not tell.
    """
    state = getattr(jax.extend.core, "get_opaque_trace_state", None)
    return state() if state else None


def is_symbolic(tensor: Any) -> bool:
    """Returns whether a tensor's value is not known yet."""
    if TRACER is None:
        return bool(tf.is_symbolic_tensor(tensor))
    return isinstance(tensor, TRACER)


def untouched(function: Function) -> Function:
    """Returns the function, marked so that AutoGraph does not rewrite it."""
    # Our functions have no Python control flow on tensors, and rewriting is
    # slow.
    if keras.backend.backend() != "tensorflow":
        return function
    return tf.autograph.experimental.do_not_convert(function)
