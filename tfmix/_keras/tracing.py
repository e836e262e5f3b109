"""Says how the running code is traced."""

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import keras

from tfmix._keras import global_state, replacing

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
else:
    import jax
    import jax.extend.core
    from keras.src.backend.jax import trainer

    # Keras's trainer imported its own reference when Keras was imported.
    JIT: tuple[replacing.Place, ...] = ((jax, "jit"), (trainer, "jit"))

Function = TypeVar("Function", bound=Callable)

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


def is_traced_with(array: Any, others: Iterable) -> bool:
    """Returns whether JAX traces an array and one of others together."""
    return hasattr(array, "_trace") and has_trace_of(array, others)


def has_trace_of(array: Any, others: Iterable) -> bool:
    """Returns whether an array and one of others have one trace, or none."""
    trace = getattr(array, "_trace", None)
    return any(trace is getattr(other, "_trace", None) for other in others)


def transformation() -> Any:
    """Returns a token of the running trace or transformation, such as `vmap`.

    It is `None` in versions of JAX that do not tell.
    """
    state = getattr(jax.extend.core, "get_opaque_trace_state", None)
    return state() if state else None


def is_symbolic(tensor: Any) -> bool:
    """Returns whether a tensor's value is not known yet."""
    if keras.backend.backend() == "tensorflow":
        return bool(tf.is_symbolic_tensor(tensor))
    return isinstance(tensor, jax.core.Tracer)


def will_run_later() -> bool:
    """Returns whether TensorFlow traces a graph that will run."""
    if keras.backend.backend() != "tensorflow" or tf.executing_eagerly():
        return False
    return global_state.open_scope() is None


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Runs a block in a separate graph, in which nothing is assigned."""
    graph = tf.__internal__.FuncGraph("tfmix_scratch")
    with keras.StatelessScope(), graph.as_default():
        yield


def untouched(function: Function) -> Function:
    """Returns the function, marked so that AutoGraph does not rewrite it."""
    # Our functions have no Python control flow on tensors, and rewriting is
    # slow.
    if keras.backend.backend() != "tensorflow":
        return function
    return tf.autograph.experimental.do_not_convert(function)


@contextlib.contextmanager
def nothing_traced() -> Iterator[None]:
    """Runs `tf.function`s op by op in a block, in all threads."""
    if keras.backend.backend() != "tensorflow":
        yield
        return
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
