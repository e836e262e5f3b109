"""Op rules in force: single Keras ops that run in float32 on 16-bit input."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import attributes, op_places
from tfmix.policy import op_rules
from tfmix.policy.in_force import attention, switchboard, tensors

# Attribute of a 16-bit scalar that a rule made: its value in float32.
WIDE = "_tfmix_float32"

_replacements = attributes.Replacements()


def replaced() -> list[attributes.Place]:
    """Returns the `(owner, attribute)` pairs that are replaced just now."""
    return _replacements.places()


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
            for place in op_places.targets(name)
        }
    )


_board = switchboard.Switchboard("tfmix_float32_ops", replace)


def install(names: Iterable[str]) -> None:
    """Puts op rules in force for the whole process.

    The call replaces rules installed before; the same call twice is as one.
    Functions traced earlier (`tf.function`, `jax.jit`, a model's compiled
    `train_step`) keep the rules they were traced under.

    Args:
        names: Ops to run in float32 on 16-bit floating input.

    Raises:
        TypeError, ValueError: As `op_rules.resolve`; nothing is changed then.
    """
    _board.install(op_rules.resolve(names))


def uninstall() -> None:
    """Ends the rules of `install`: every function is Keras's own again."""
    install(())


def installed() -> list[str]:
    """Returns the names `install` put in force, sorted, as a copy."""
    return sorted(_board.installed)


@contextlib.contextmanager
def in_force(names: Iterable[str]) -> Iterator[None]:
    """Runs a block under exactly these op rules, whatever is installed.

    For a model that carries its rules with it: other threads, and the code
    after the block, keep theirs. `in_force(())` runs the block without any.

    Args:
        names: Ops to run in float32 on 16-bit floating input.

    Raises:
        TypeError, ValueError: As `op_rules.resolve`.

    Example:
        >>> import keras
        >>> ones = keras.ops.ones((4096,), dtype="float16")
        >>> with in_force(["sum"]):
        ...     float(keras.ops.sum(ones * 3))
        12288.0
    """
    with _board.block(op_rules.resolve(names)):
        yield


def _rule(original: Any, name: str, in_force: Callable[[str], bool]) -> Any:
    if inspect.ismodule(original):
        # One name for many ops; each asks for its own rule.
        each = functools.partial(_rule, in_force=in_force)
        return op_places.stand_in(original, each)
    if original.__qualname__.endswith(op_places.ATTENTION_METHOD):
        return attention.rule(original, in_force)
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
