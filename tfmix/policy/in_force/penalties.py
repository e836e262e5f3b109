"""Makes Keras's losses, metrics and penalties compute in float32.

Loss functions and `Loss` objects reach every op through the name `ops` of
their own module, so one stand-in for that name serves them all, however a
user imported them. Metrics and regularizers are widened at their doors,
`update_state` and `__call__`.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1, backends
TensorFlow and JAX.
"""

import contextlib
import functools
import importlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from absl import logging

from tfmix._keras import attributes
from tfmix.policy.in_force import ops as ops_in_force
from tfmix.policy.in_force import softmax_logits, tensors

LOSSES = "losses"
METRICS = "metrics"
PENALTIES = "penalties"
OUTPUTS = "outputs"
NAMES = (LOSSES, METRICS, PENALTIES, OUTPUTS)

_LOSS_MODULES = ("keras.src.losses.losses", "keras.src.losses.loss")
_replacements = attributes.Replacements()
# Compiled losses whose 16-bit predictions have been reported.
_reported: weakref.WeakSet = weakref.WeakSet()


def replaced() -> list[attributes.Place]:
    """Returns the `(owner, attribute)` pairs that are replaced just now."""
    return _replacements.places()


def replace(names: Iterable[str], in_force: Callable[[str], bool]) -> None:
    """Makes the replaced places exactly those of the names.

    Args:
        names: Some of `NAMES`.
        in_force: Asked on every call whether a name holds for the caller; if
            not, the call goes straight to Keras.
    """
    wanted: dict[attributes.Place, Callable[[Any], Any]] = {}
    for name in names:
        holds = functools.partial(in_force, name)
        wanted.update(_makers(name, holds))
    _replacements.set(wanted)


def _makers(
    name: str, holds: Callable[[], bool]
) -> dict[attributes.Place, Callable[[Any], Any]]:
    if name == LOSSES:
        modules = [_module(path) for path in _LOSS_MODULES]
        return {(m, "ops"): lambda o: _WideOps(o, holds) for m in modules}
    if name == METRICS:
        return {
            (cls, "update_state"): functools.partial(_widening, holds=holds)
            for cls in _keras_classes(keras.metrics.Metric, "update_state")
        }
    if name == PENALTIES:
        return _penalty_makers(holds)
    compiled = vars(_module("keras.src.trainers.compile_utils"))["CompileLoss"]
    return {(compiled, "call"): functools.partial(_reporting, holds=holds)}


def _penalty_makers(
    holds: Callable[[], bool],
) -> dict[attributes.Place, Callable[[Any], Any]]:
    widening = functools.partial(_widening, holds=holds)
    base = keras.regularizers.Regularizer
    makers: dict[attributes.Place, Callable[[Any], Any]] = {
        (cls, "__call__"): widening for cls in _keras_classes(base, "__call__")
    }
    makers[keras.Layer, "add_loss"] = widening
    # Losses that were added before tfmix had a say, on their way into the
    # sum with the compiled loss that TensorFlow refuses to mix dtypes in.
    trainer = vars(_module("keras.src.trainers.trainer"))["Trainer"]
    makers[trainer, "_aggregate_additional_loss"] = widening
    return makers


class _WideOps(types.ModuleType):
    """`keras.ops` as losses see it: 16-bit tensors go in as float32."""

    def __init__(self, ops: Any, holds: Callable[[], bool]) -> None:
        super().__init__(ops.__name__)
        self._ops = ops
        self._holds = holds

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if not inspect.isfunction(value) or not self._holds():
            return value
        if name in softmax_logits.LOSSES:
            value = softmax_logits.recovering(value)
        return functools.partial(_call_wide, value)


def _call_wide(function: Callable, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tensors.map_leaves((args, kwargs), wide)
    return function(*args, **kwargs)


def wide(value: Any) -> Any:
    """Casts a 16-bit tensor to float32 and keeps what Keras attached to it.

    Args:
        value: Anything. A scalar that an op rule rounded comes back as it
            was before.

    Returns:
        A float32 tensor with the mask and the logits of the 16-bit one, so
        that a masked metric and the loss of a softmax head stay right; any
        other value as it came.
    """
    if not tensors.is_16_bit(value):
        return value
    result = getattr(value, ops_in_force.WIDE, None)
    if result is None:
        result = keras.ops.cast(value, "float32")
    for attribute in ("_keras_mask", "_keras_logits"):
        attached = getattr(value, attribute, None)
        if attached is not None:
            # JAX arrays take no attributes, and Keras puts none on them.
            with contextlib.suppress(AttributeError):
                setattr(result, attribute, tensors.widen(attached))
    return result


def _widening(original: Callable, holds: Callable[[], bool]) -> Callable:
    @functools.wraps(original)
    def widened(self: Any, *args: Any, **kwargs: Any) -> Any:
        if holds():
            args, kwargs = tensors.map_leaves((args, kwargs), wide)
        return original(self, *args, **kwargs)

    return widened


def _reporting(original: Callable, holds: Callable[[], bool]) -> Callable:
    @functools.wraps(original)
    def reporting(self: Any, y_true: Any, y_pred: Any, *args: Any) -> Any:
        if holds() and self not in _reported:
            _report(y_pred)
            _reported.add(self)
        return original(self, y_true, y_pred, *args)

    return reporting


def _report(y_pred: Any) -> None:
    dtypes: list[str] = []
    tensors.map_leaves(y_pred, lambda t: dtypes.append(tensors.float_dtype(t)))
    for number, dtype in enumerate(dtypes):
        if dtype in ("float16", "bfloat16"):
            logging.warning(
                "Output %d of the model is %s: its last rounding reaches the "
                "loss, and probabilities below the format's range become 0. "
                "End the model with `tfmix.float32_output(activation)`, for "
                "example `Dense(10)` and `tfmix.float32_output('softmax')` "
                "in place of `Dense(10, activation='softmax')`.",
                number,
                dtype,
            )


def _keras_classes(base: type, method: str) -> Iterator[type]:
    """Yields Keras's own subclasses that write a method themselves."""
    subclass: type
    for subclass in type.__subclasses__(base):
        if subclass.__module__.startswith("keras.src."):
            if inspect.isfunction(vars(subclass).get(method)):
                yield subclass
            yield from _keras_classes(subclass, method)


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise RuntimeError(
            f"tfmix found no module {path!r} in Keras {keras.__version__}, so "
            "losses cannot be kept in float32. Use a Keras version that tfmix "
            "was checked on (3.12 to 3.15)."
        ) from error
