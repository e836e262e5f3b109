"""Finds out how the running code is traced and compiled."""

import collections
import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from tfmix._keras import context_values, global_state, replacing

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    # `tfmix` replaces it in that module.
    _tensorflow_cast = tf.cast
else:
    import jax
    import jax.extend.core
    from jax.experimental import layout
    from jax.interpreters import batching, mlir

Function = TypeVar("Function", bound=Callable)

# These operations take a variable's handle and do not change the variable.
_READS = frozenset(
    "ReadVariableOp ResourceGather VarIsInitializedOp VariableShape".split()
)
# A tensor with more numbers is large.
_LARGE = 2**18
_RUNS_EAGERLY = "_run_functions_eagerly"
# `trace` returns this for code that is not traced.
EAGER = "eager"
_lock = threading.Lock()
# Counts the blocks that each thread is in; the last one to end restores all.
_blocks: collections.Counter[int] = collections.Counter()
_replacements = replacing.Replacements()


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


def compiled_for(platform: str) -> contextlib.AbstractContextManager[None]:
    """Sets the platform that a block is traced for: "tpu", "cuda"."""
    return context_values.holding(platform=platform)


def for_tpu() -> bool:
    """Returns whether TensorFlow is known to trace for a TPU."""
    strategy = type(tf.distribute.get_strategy()).__name__
    return context_values.block.get().platform == "tpu" or "TPU" in strategy


def for_gpu(tensor: Any = None) -> bool:
    """Returns whether TensorFlow traces for an NVIDIA GPU.

    Args:
        tensor: An operand, which may lie on a CPU.
    """
    platform = context_values.block.get().platform
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


def kept_apart(tensor: Any) -> Any:
    """Returns the tensor behind a barrier to compiler optimizations."""
    if keras.backend.backend() == "jax":
        return jax.lax.optimization_barrier(tensor)
    if not by_xla():
        return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=())
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return gen_xla_ops.xla_optimization_barrier([tensor])[0]


def bitcast(tensor: Any, dtype: str) -> Any:
    """Reads the same bits as another dtype of the same size."""
    tensor = keras.ops.convert_to_tensor(tensor)
    if keras.backend.backend() == "tensorflow":
        return tf.bitcast(tensor, dtype)
    return jax.lax.bitcast_convert_type(tensor, dtype)


def not_finite(tensor: Any) -> Any:
    """Returns which numbers of a float tensor are infinite or NaN."""
    if keras.backend.backend() == "jax":
        # `jax.numpy` would trace a function for each of hundreds of gradients.
        return jax.lax.bitwise_not(jax.lax.is_finite(tensor))
    return tf.logical_not(tf.math.is_finite(tensor))


def any_true(flags: Any) -> Any:
    """Returns whether a boolean tensor holds a true, as a scalar tensor."""
    if keras.backend.backend() == "jax":
        return jax.lax.reduce_or(flags, tuple(range(flags.ndim)))
    return tf.reduce_any(flags)


def by_shape(
    tensors: Sequence, function: Callable[[list], Any], apart: Callable
) -> Any:
    """Joins the vectors that a function returns for tensors of one shape.

    Args:
        tensors: The tensors.
        function: Takes tensors of one shape; returns a number for each.
        apart: Returns whether a tensor may not be joined with others.

    Returns:
        A vector with the number of each tensor.
    """
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for n, tensor in enumerate(tensors):
        groups[n if apart(tensor) else tuple(tensor.shape)].append(n)
    order = [n for group in groups.values() for n in group]
    parts = [function([tensors[n] for n in g]) for g in groups.values()]
    joined = keras.ops.concatenate(parts)
    in_order = order == sorted(order)
    return joined if in_order else keras.ops.take(joined, np.argsort(order))


def sums(tensors: Sequence, together: tuple[int, int]) -> Any:
    """Returns the sums of integer tensors of one shape, as a vector.

    Args:
        tensors: The tensors.
        together: The number of small, and of large tensors that one kernel
            reads.
    """
    step = together[math.prod(tensors[0].shape) > _LARGE]
    parts = [
        _sums(tensors[start : start + step])
        for start in range(0, len(tensors), step)
    ]
    return keras.ops.concatenate(parts)


def _sums(tensors: Sequence) -> Any:
    # XLA reads all of them in one kernel. Separate sums take two kernels each.

    def added(*both: Any) -> tuple:
        half = len(both) // 2
        pairs = zip(both[:half], both[half:], strict=True)
        return tuple(left + right for left, right in pairs)

    axes = range(len(tensors[0].shape))
    if keras.backend.backend() == "jax":
        zeros = [jax.numpy.zeros((), tensor.dtype) for tensor in tensors]
        totals = jax.lax.reduce(
            tuple(tensors),
            tuple(zeros),
            lambda *halves: added(*halves[0], *halves[1]),
            tuple(axes),
        )
        return jax.numpy.stack(totals)
    if not by_xla():
        return tf.stack([tf.reduce_sum(tensor) for tensor in tensors])
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    scalars = [tf.TensorSpec((), tensor.dtype) for tensor in tensors]
    reducer = tf.function(added, autograph=False)
    totals = gen_xla_ops.xla_variadic_reduce_v2(
        list(tensors),
        [tf.zeros((), tensor.dtype) for tensor in tensors],
        list(axes),
        reducer.get_concrete_function(*scalars, *scalars),
    )
    return tf.stack(totals)


def float8_product(
    a: Any, b: Any, transposed: tuple[bool, bool], dtype: str
) -> Any:
    """Multiplies two float8 matrices, each transposed first or not.

    On a GPU the algorithm is set to that of the vendor's library. Otherwise XLA
    compiles and times kernels of its own for each product, which takes minutes
    in a first step and gives slower kernels. On a single GPU both
    matrices are also stored row by row. Otherwise XLA stores a weight as its
    first product needs it, and another kernel transposes it for the next.

    Returns:
        The product, summed in float32. It is bfloat16 if `dtype` is, because
        the library returns that at once, and float32 otherwise.
    """
    dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    axes = int(not transposed[0]), int(transposed[1])
    if keras.backend.backend() == "jax":
        default = functools.partial(
            jax.lax.dot_general,
            dimension_numbers=(((axes[0],), (axes[1],)), ((), ())),
            preferred_element_type=dtype,
        )
        by_library = functools.partial(
            default, precision=jax.lax.DotAlgorithmPreset[_BY_LIBRARY]
        )
        rows = layout.Layout((0, 1))

        def by_rows(*both: Any) -> Any:
            return by_library(*layout.with_layout_constraint(both, rows))

        # Devices that share a matrix would exchange it to store it by rows.
        on_gpu = by_target(single=by_rows, default=by_library)
        return jax.lax.platform_dependent(a, b, cuda=on_gpu, default=default)
    if not by_xla():
        # TensorFlow's own operations do not support float8.
        wide = tf.cast(a, tf.float32), tf.cast(b, tf.float32)
        return tf.cast(tf.matmul(*wide, *transposed), dtype)
    shape = a.shape[1 - axes[0]], b.shape[1 - axes[1]]
    types = [_stablehlo_type(x.shape, x.dtype.name) for x in (a, b)]
    types.append(_stablehlo_type(shape, dtype))
    layouts, factors, algorithm = "", "%a, %b", ""
    if for_gpu():
        layouts, factors = _STABLEHLO_BY_ROWS.format(*types), "%x, %y"
        narrow = [_STABLEHLO[x.dtype.name] for x in (a, b)]
        algorithm = _STABLEHLO_BY_LIBRARY.format(*narrow)
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    (product,) = gen_xla_ops.xla_call_module(
        [a, b],
        version=9,
        module=_FLOAT8_PRODUCT.format(
            *types, layouts, factors, *axes, algorithm
        ),
        Sout=[list(shape)],
        Tout=[tf.as_dtype(dtype)],
        # The module holds nothing that depends on the platform.
        platforms=["CPU"],
        disabled_checks=["platform"],
        function_list=[],
        has_token_input_output=False,
    )
    return product


# The attribute leaves the batch size open until it is compiled.
_FLOAT8_PRODUCT = """module attributes {{jax.uses_shape_polymorphism = true}} {{
  func.func public @main(%a: {0}, %b: {1}) -> {2} {{{3}
    %c = stablehlo.dot_general {4}, contracting_dims = [{5}] x [{6}]{7}
      : ({0}, {1}) -> {2}
    return %c : {2}
  }}
}}"""
_STABLEHLO_BY_ROWS = "".join(
    f"""
    %{result} = stablehlo.custom_call @LayoutConstraint(%{matrix}) {{{{
      operand_layouts = [dense<[1, 0]> : tensor<2xindex>],
      result_layouts = [dense<[1, 0]> : tensor<2xindex>]
    }}}} : ({kind}) -> {kind}"""
    for matrix, result, kind in (("a", "x", "{0}"), ("b", "y", "{1}"))
)
# This algorithm multiplies any two float8 formats, and sums as Tensor Cores do
# by default. XLA has no kernels of its own for it, so it calls the library. JAX
# and StableHLO both have it.
_BY_LIBRARY = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
_STABLEHLO_BY_LIBRARY = """, algorithm = <
      lhs_precision_type = {0}, rhs_precision_type = {1},
      accumulation_type = f32, lhs_component_count = 1,
      rhs_component_count = 1, num_primitive_operations = 1,
      allow_imprecise_accumulation = true>"""
_STABLEHLO = {
    "float8_e4m3fn": "f8E4M3FN",
    "float8_e5m2": "f8E5M2",
    "bfloat16": "bf16",
    "float32": "f32",
}


def _stablehlo_type(shape: Sequence, dtype: str) -> str:
    sides = ["?" if side is None else str(side) for side in shape]
    return f"tensor<{'x'.join([*sides, _STABLEHLO[dtype]])}>"


def by_target(single: Callable, default: Callable) -> Callable[..., Any]:
    """Returns a function of tensors that XLA compiles for its target.

    Both functions compute the same: `single` on a single accelerator, and
    `default` where several devices share the tensors, or on a CPU. The host's
    own devices do not matter. TensorFlow's tensors are not shared.
    """
    if keras.backend.backend() == "tensorflow":
        return single
    primitive = jax.extend.core.Primitive("tfmix_by_target")

    def lower(context: Any, *values: Any) -> Any:
        around = context.module_context
        is_alone = getattr(around.axis_context, "num_devices", None) == 1
        on_cpu = "cpu" in around.platforms
        chosen = single if is_alone and not on_cpu else default
        lowering = mlir.lower_fun(chosen, multiple_results=False)
        return lowering(context, *values)

    def batched(values: Sequence, axes: Sequence) -> tuple[Any, int]:
        return jax.vmap(default, axes)(*values), 0

    def abstract(*values: Any) -> Any:
        shape = jax.eval_shape(default, *values)
        return jax.core.ShapedArray(shape.shape, shape.dtype)

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(jax.jit(default))
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = batched
    # The result has no gradient.
    return lambda *values: primitive.bind(*jax.lax.stop_gradient(values))


def becomes_constant(variable: keras.Variable) -> bool:
    """Returns whether JAX is compiling and would fix the variable's value."""
    if keras.backend.backend() != "jax":
        return False
    scope = global_state.open_scope()
    if scope is not None and scope.get_current_value(variable) is not None:
        return False
    # JAX makes a tracer out of a constant only while it compiles.
    return is_symbolic(jax.numpy.zeros(())) and not is_symbolic(variable.value)


def is_host_readable(variable: keras.Variable) -> bool:
    """Returns whether NumPy can read the variable here, each time anew."""
    if keras.backend.backend() == "jax":
        known = not is_symbolic(variable.value)
        return known and not becomes_constant(variable)
    return bool(tf.executing_eagerly())


def host_value(variable: Any) -> np.ndarray:
    """Returns the value of a host-readable variable or tensor."""
    # NumPy 2 warns about the conversion that TensorFlow's variables offer.
    value = backend_variable(variable)
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def number_or_value(variable: keras.Variable) -> Any:
    """Returns a NumPy number for a variable of an eager step (TensorFlow)."""
    if keras.backend.backend() != "tensorflow":
        return variable.value
    is_eager = tf.executing_eagerly() and not tf.distribute.has_strategy()
    if is_eager and global_state.open_scope() is None:
        return host_value(variable)[()]
    return variable.value


def value_outside(variable: keras.Variable) -> np.ndarray | None:
    """Returns a variable's value outside any trace, None if it has none."""
    if keras.backend.backend() == "jax":
        # A step of `fit` takes the values out, or lets XLA overwrite them.
        value = variable._value
        is_gone = value is None or getattr(value, "is_deleted", bool)()
        return None if is_gone else np.asarray(value)
    with tf.init_scope():
        inner = backend_variable(variable)
        if not (tf.executing_eagerly() and inner.is_initialized()):
            return None
        return np.asarray(inner.numpy())


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


def untouched(function: Function) -> Function:
    """Returns the function, marked so that AutoGraph does not rewrite it."""
    # Our functions have no Python control flow on tensors, and rewriting is
    # slow.
    if keras.backend.backend() != "tensorflow":
        return function
    return tf.autograph.experimental.do_not_convert(function)


def outside_of_tracing(
    variables: Sequence,
) -> contextlib.AbstractContextManager:
    """Creates variables outside the function that TensorFlow traces."""
    # A first value that is read from the model would become part of the step,
    # which XLA refuses.
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    if not tf.inside_function() or tf.distribute.has_strategy():
        return contextlib.nullcontext()
    with tf.init_scope():
        ready = tf.executing_eagerly() and all(
            bool(backend_variable(variable).is_initialized())
            for variable in variables
        )
    return _lifted() if ready else contextlib.nullcontext()


@contextlib.contextmanager
def _lifted() -> Iterator[None]:
    """Creates variables as eager code does, within a traced function."""

    def create(following: Callable, **kwargs: Any) -> Any:
        # A function that lifts variables itself is traced a second time.
        kwargs["experimental_enable_variable_lifting"] = False
        return following(**kwargs)

    with tf.init_scope(), tf.variable_creator_scope(create):
        yield


def backend_variable(variable: Any) -> Any:
    """Returns the `tf.Variable` of a Keras variable, or the one given."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def read(variable: Any) -> Any:
    """Returns a variable's current value, as a tensor that does not change."""
    value = backend_variable(variable)
    if keras.backend.backend() != "tensorflow" or isinstance(value, tf.Tensor):
        return value
    return tf.convert_to_tensor(value)


def cast(tensor: Any, dtype: str) -> Any:
    """Casts a tensor by the backend's own function, replaced or not."""
    if keras.backend.backend() == "jax":
        return jax.numpy.asarray(tensor, dtype)
    return _tensorflow_cast(tensor, dtype)


def selected(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Returns one of two tensors of one shape and dtype, by a scalar (XLA)."""
    if keras.backend.backend() == "jax":
        # `where` compiles a program of its own at each place, with broadcasts.
        return jax.lax.select(condition, if_true, if_false)
    return tf.where(condition, if_true, if_false)


def is_symbolic(tensor: Any) -> bool:
    """Returns whether a tensor's value is not known yet."""
    if keras.backend.backend() == "tensorflow":
        return bool(tf.is_symbolic_tensor(tensor))
    return isinstance(tensor, jax.core.Tracer)


def cast_from(tensor: Any) -> Any:
    """Returns the source of a cast in TensorFlow's graph, or `None`."""
    is_symbol = keras.backend.backend() == "tensorflow" and isinstance(
        tensor, tf.Tensor
    )
    if not is_symbol or tf.executing_eagerly() or tensor.op.type != "Cast":
        return None
    return tensor.op.inputs[0]


def may_be_written(variable: Any) -> bool:
    """Returns whether the code traced so far may change a variable."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(graph, "capture"):
        return True
    users = graph.capture(backend_variable(variable).handle).consumers()
    return any(user.type not in _READS for user in users)


@contextlib.contextmanager
def nothing_traced() -> Iterator[None]:
    """Runs `tf.function`s op by op in a block, in the calling thread only."""
    if keras.backend.backend() != "tensorflow":
        yield
        return
    thread = threading.get_ident()
    with _lock:
        _blocks[thread] += 1
        # This is the class of what `tf.function` returns.
        function = type(tf.function(lambda: None))
        _replacements.set({(function, _RUNS_EAGERLY): _or_in_a_block})
    try:
        yield
    finally:
        with _lock:
            _blocks[thread] -= 1
            if not _blocks[thread]:
                del _blocks[thread]
            if not _blocks:
                _replacements.set({})


def _or_in_a_block(original: property) -> property:
    def is_eager(function: object) -> bool:
        usually = original.__get__(function, type(function))
        return threading.get_ident() in _blocks or bool(usually)

    return property(is_eager)
