"""Finds the functions that compute each op: Keras's, and operators of tensors.

Keras looks up every backend function (`backend.numpy.sum`) in each call, so a
copy in place of the module `backend.numpy` reaches every caller. Ops composed
in `keras.src.ops` have a private function there (`_normalize`).
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator

import keras
from keras.src import backend, ops

from tfmix._keras import replacing, version

# Keras 3.16 moved them one level deeper.
BACKEND_OPS = getattr(backend, "ops", backend)
# The public ops prefer this order: `tanh` is in `numpy` and `nn`, and Keras
# 3.12 has a second, unused `norm` in `math`.
_THEMES = ("linalg", "numpy", "nn", "math", "image")
_PUBLIC = (keras.ops, keras.ops.image)
# These make tensors of a dtype from numbers, or return their argument. No other
# function of that module (loops, branches) takes a dtype.
CONVERSIONS = ("cast", "convert_to_tensor", "stop_gradient")
# These run a function of their caller.
WITH_FUNCTIONS = frozenset(
    ("scan", "fori_loop", "while_loop", "associative_scan", "vectorized_map")
)
# The other ops of that module. The rest are branches.
_OF_CORE = (
    *("slice", "slice_update", "scatter", "scatter_update", "unstack"),
    *sorted(WITH_FUNCTIONS),
)
_CORE: replacing.Place = (
    BACKEND_OPS if hasattr(BACKEND_OPS, "core") else backend,
    "core",
)
ATTENTION = "dot_product_attention"
# With dropout, returned scores or more than one attention axis, the attention
# layers call this method instead of `ops.dot_product_attention`.
_ATTENTION_METHOD = "_compute_attention"
ATTENTION_METHODS: tuple[replacing.Place, ...] = tuple(
    (layer, _ATTENTION_METHOD)
    for layer in (
        keras.layers.MultiHeadAttention,
        keras.layers.GroupQueryAttention,
    )
    if _ATTENTION_METHOD in vars(layer)
)


# Every dropout calls this function.
DROPOUT: replacing.Place = (backend.random, "dropout")

# The ops that operators compute. Those of two factors also exist in reverse.
_OF_TWO = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "mod",
    "pow": "power",
    "matmul": "matmul",
}
_OTHERS = {
    "neg": "negative",
    "abs": "abs",
    "getitem": "get_item",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}
# The method of each operator, its op, and whether its factors are in reverse.
_OPERATORS = [
    *((f"__{name}__", op, False) for name, op in (_OF_TWO | _OTHERS).items()),
    *((f"__r{name}__", op, True) for name, op in _OF_TWO.items()),
]

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    _TENSORS: tuple[type, ...] = (tf.Tensor,)
    _FUNCTIONS: dict[replacing.Place, str] = {
        (tf, "where"): "where",
        (tf, "constant"): "convert_to_tensor",
        (tf, "cast"): "cast",
        (tf, "vectorized_map"): "vectorized_map",
        # An epsilon below float16's numbers stands in these.
        **{
            (module, name): op
            for module in (tf, tf.math)
            for name, op in (("maximum", "maximum"), ("minimum", "minimum"))
        },
        (tf, "clip_by_value"): "clip",
        **{
            (module, "l2_normalize"): "normalize"
            for module in (tf.math, tf.nn, tf.linalg)
        },
    }
else:
    import jax
    from jax._src.array import ArrayImpl

    _TENSORS = (ArrayImpl, jax.core.Tracer)
    _FUNCTIONS = {
        (jax.numpy, "where"): "where",
        # Their carries may become float32 in a step.
        (jax.lax, "scan"): "scan",
        (jax.lax, "fori_loop"): "fori_loop",
    }

# Each place of an operator, or of a function beside these, with the op that it
# computes and whether its factors are in reverse.
OPERATORS: dict[replacing.Place, tuple[str, bool]] = {
    **{
        (tensor, name): (op, is_reversed)
        for tensor in _TENSORS
        for name, op, is_reversed in _OPERATORS
    },
    **{place: (name, False) for place, name in _FUNCTIONS.items()},
}


def is_op(name: str) -> bool:
    """Returns whether a rule can have this name."""
    public = any(hasattr(module, name) for module in _PUBLIC)
    return public and name not in CONVERSIONS and bool(targets(name))


def op_names() -> list[str]:
    """Returns the sorted names of all ops that a rule can have."""
    public = {name for module in _PUBLIC for name in dir(module)}
    return sorted(n for n in public if not n.startswith("_") and is_op(n))


@functools.cache
def targets(name: str) -> tuple[replacing.Place, ...]:
    """Finds what to replace for an op: its module, or a function.

    Keras's backends import functions from each other, and call those of their
    own module directly. Neither kind of call is replaced.
    """
    if name in CONVERSIONS or name in _OF_CORE:
        return (_CORE,)
    for theme, module in _modules(BACKEND_OPS):
        if _defines(module, name):
            return ((BACKEND_OPS, theme),)
    for _, module in _modules(ops):
        if _defines(module, f"_{name}"):
            return ((module, f"_{name}"),)
    return ()


def copy_module(module: types.ModuleType, make: Callable) -> types.ModuleType:
    """Copies a module, with `make(function, name=name)` for each op."""
    is_core = module.__name__.endswith(".core")
    names = (*CONVERSIONS, *_OF_CORE) if is_core else tuple(vars(module))
    own = [n for n in names if not n.startswith("_") and _defines(module, n)]
    functions = {name: make(vars(module)[name], name=name) for name in own}
    return replacing.copy_module(module, functions)


def writes_out(layer: keras.Layer, arguments: dict) -> bool:
    """Returns whether a call will not use `ops.dot_product_attention`."""
    dropout = getattr(layer, "_dropout", getattr(layer, "dropout", 0.0))
    scores = arguments.get("return_attention_scores") or getattr(
        layer, "_return_attention_scores", False
    )
    return dropout > 0.0 or scores or len(arguments["query"].shape) != 4


@contextlib.contextmanager
def float32_softmax(layer: keras.Layer) -> Iterator[None]:
    """Keeps the layer's own softmax from casting its logits to 16 bit."""
    with contextlib.ExitStack() as undo:
        if (softmax := getattr(layer, "_softmax", None)) is not None:
            float32 = keras.DTypePolicy("float32")
            replacing.swap(undo, softmax, "_dtype_policy", float32)
        yield


def has_float32_logits() -> bool:
    """Returns whether the backend makes float32 logits of 16-bit queries."""
    # JAX does on accelerators, where a cast before it would only rule out flash
    # attention. On a CPU it has no such product of float16 and raises an error.
    if keras.backend.backend() != "jax":
        return False
    import jax

    return bool(jax.default_backend() != "cpu")


def _defines(module: types.ModuleType, name: str) -> bool:
    """Returns whether a module defines a function rather than imports it."""
    value = vars(module).get(name)
    return inspect.isfunction(value) and value.__module__ == module.__name__


@functools.cache
def _modules(package: types.ModuleType) -> list[tuple[str, types.ModuleType]]:
    """Lists the op modules of a package, with their themes."""
    modules = [
        (theme, getattr(package, theme))
        for theme in _THEMES
        if inspect.ismodule(getattr(package, theme, None))
    ]
    if not modules:
        raise version.misfit(
            f"{package.__name__} has none of the op modules {list(_THEMES)}, "
            "which `float32_ops` needs; without them, pass `float32_ops=[]`"
        )
    return modules
