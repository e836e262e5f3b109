"""Runs single Keras ops in float32 by replacing the functions behind them.

Keras looks every backend function up as an attribute (`backend.numpy.sum`)
each time it is called, on all routes: eager `keras.ops`, `Operation` objects
stored in Functional graphs, layers and activations. Replacing the attribute
therefore reaches every caller, also those that did `from keras.ops import sum`
long before. Ops that are composed in `keras.src.ops` itself have a private
worker there (`_normalize`), which both routes call and which is replaced
instead.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1, backends
TensorFlow and JAX.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfmix import _formats
from tfmix.policy import attention_patch, replacements, tensors

# Later Keras versions keep the op modules below `backend.ops`.
_BACKEND_PARENTS = ("keras.src.backend", "keras.src.backend.ops")
_OP_PARENTS = ("keras.src.ops", "keras.src.backend.ops")
_THEMES = ("numpy", "nn", "math", "linalg", "image")
# Attribute of a 16-bit scalar that a rule made: its value in float32.
WIDE = "_tfmix_float32"

_replacements = replacements.Replacements()


def replaced() -> list[replacements.Place]:
    """Returns the `(owner, attribute)` pairs that are replaced just now."""
    return _replacements.places()


def is_op(name: str) -> bool:
    """Says whether Keras has a public op or activation that can be ruled.

    Args:
        name: A name as in `keras.ops` or `keras.activations`.

    Returns:
        True if the function exists and tfmix knows where to reach it.
    """
    public = hasattr(keras.ops, name) or hasattr(keras.activations, name)
    return public and bool(targets(name))


def op_names() -> list[str]:
    """Returns the sorted names of all ops that can be put under a rule."""
    public = {*dir(keras.ops), *dir(keras.activations)}
    return sorted(n for n in public if not n.startswith("_") and targets(n))


@functools.cache
def targets(name: str) -> tuple[replacements.Place, ...]:
    """Finds where the work of one op is done.

    Args:
        name: A name as in `keras.ops` or `keras.activations`.

    Returns:
        `(owner, attribute)` pairs, empty if there is nothing to replace.
    """
    if name == attention_patch.OP:
        if attention_patch.has_float32_logits():
            return attention_patch.places()
        return attention_patch.places() + _functions(name)
    return _functions(name) or _activation_class(name)


def _functions(name: str) -> tuple[replacements.Place, ...]:
    for parents, function in (
        (_BACKEND_PARENTS, name),
        (_OP_PARENTS, f"_{name}"),
    ):
        found = [m for m in _modules(parents) if _defines(m, function)]
        if found:
            return tuple((module, function) for module in found)
    return ()


def replace(names: Iterable[str], in_force: Callable[[str], bool]) -> None:
    """Makes the replaced functions exactly those behind `names`.

    Args:
        names: Ops to have replaced; all others get Keras's own function back.
        in_force: Asked on every call of a replaced op whether its rule holds
            for the caller; if not, the call goes straight to Keras.
    """
    _replacements.set(
        {
            place: functools.partial(_rule, name=name, in_force=in_force)
            for name in names
            for place in targets(name)
        }
    )


def _defines(module: Any, name: str) -> bool:
    """Says whether a module wrote a function itself, not only imports it."""
    value = vars(module).get(name)
    return inspect.isfunction(value) and value.__module__ == module.__name__


@functools.cache
def _modules(parents: tuple[str, ...]) -> list[Any]:
    modules: list[Any] = []
    for parent in parents:
        try:
            package = importlib.import_module(parent)
        except ImportError:
            continue
        for theme in _THEMES:
            module = getattr(package, theme, None)
            if inspect.ismodule(module) and module not in modules:
                modules.append(module)
    if not modules:
        raise RuntimeError(
            f"tfmix found none of the op modules {list(_THEMES)} below "
            f"{list(parents)} in Keras {keras.__version__}, so `float32_ops` "
            "cannot work. Pass `float32_ops=[]`, or use a Keras version that "
            "tfmix was checked on (3.12 to 3.15)."
        )
    return modules


def _activation_class(name: str) -> tuple[replacements.Place, ...]:
    """Finds activations that do their own arithmetic, such as mish."""
    try:
        module = importlib.import_module("keras.src.activations.activations")
    except ImportError:
        return ()
    for label, value in vars(module).items():
        same = label.lower() == name.replace("_", "")
        if same and inspect.isclass(value) and "static_call" in vars(value):
            return ((value, "static_call"),)
    return ()


def _rule(original: Any, name: str, in_force: Callable[[str], bool]) -> Any:
    if original.__qualname__.endswith(attention_patch.METHOD):
        return attention_patch.rule(original, in_force)
    static = isinstance(original, staticmethod)
    function = original.__func__ if static else original
    dtype_at = _dtype_position(function)

    @functools.wraps(function)
    def rule(*args: Any, **kwargs: Any) -> Any:
        if not in_force(name):
            return function(*args, **kwargs)
        source = tensors.only_16_bit((args, kwargs))
        wanted = _wanted_dtype(args, kwargs, dtype_at)
        if source is None or wanted not in (None, *_formats.SIXTEEN_BIT):
            return function(*args, **kwargs)
        args, kwargs = tensors.map_leaves((args, kwargs), tensors.widen)
        if wanted is not None:
            args, kwargs = _with_float32(args, kwargs, dtype_at)
        result = function(*args, **kwargs)
        return _narrowed(result, wanted or source)

    return staticmethod(rule) if static else rule


def _dtype_position(function: Callable) -> int:
    names = list(inspect.signature(function).parameters)
    return names.index("dtype") if "dtype" in names else len(names) + 1


def _wanted_dtype(args: tuple, kwargs: dict, position: int) -> str | None:
    wanted = kwargs.get("dtype")
    if len(args) > position:
        wanted = args[position]
    return None if wanted is None else keras.backend.standardize_dtype(wanted)


def _with_float32(
    args: tuple, kwargs: dict, position: int
) -> tuple[tuple, dict]:
    if len(args) > position:
        return (*args[:position], "float32", *args[position + 1 :]), kwargs
    return args, {**kwargs, "dtype": "float32"}


def _narrowed(result: Any, dtype: str) -> Any:
    def narrow(value: Any) -> Any:
        return _remembering(tensors.narrow(value, dtype), value)

    return tensors.map_leaves(result, narrow)


def _remembering(narrow: Any, wide: Any) -> Any:
    """Notes a scalar's float32 value, for `add_loss` of a large penalty."""
    if narrow is not wide and len(wide.shape) == 0:
        # JAX arrays take no attributes; the penalty is then what the 16-bit
        # format can hold.
        with contextlib.suppress(AttributeError):
            setattr(narrow, WIDE, wide)
    return narrow
