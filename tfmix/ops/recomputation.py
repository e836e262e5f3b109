"""Runs users' gradient code with unscaled gradients, in the layer's settings.

The gradient of a `tf.custom_gradient` is the user's code and runs after the
layer's call. Its variables would be read in float32, and no rule would be
active. `tf.recompute_grad` (`keras.remat`, `keras.RematScope`) is such a
function: it runs the layer's own code again.

A user's gradient need not grow with what comes in: it may clip, or take the
sign. In a float16 model it gets the gradient in float32 and unscaled.
"""

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import (
    context_values,
    global_state,
    layers,
    tapes,
)
from tfmix.ops import tensors

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

PLACES = tapes.CUSTOM
# Scaling changes nothing in the gradients of these packages' functions, which
# are linear in what comes in.
_LINEAR = {"tensorflow", "keras", "tfmix"}
# Opens a block with the replacements of a call.
Block = Callable[[], Any]


def alike(original: Callable, block_as_now: Callable[[], Block]) -> Callable:
    """Returns a recorder of custom gradients that keeps the call's settings.

    Args:
        original: TensorFlow's recorder. It calls a user's function, which
            returns a result and its gradient function.
        block_as_now: Function that returns a function, which opens a block with
            the replacements of now.
    """

    @functools.wraps(original)
    def record(f: Callable, args: Any, kwargs: Any) -> Any:
        block = block_as_now()
        now = context_values.block.get()
        is_linear = (f.__module__ or "").partition(".")[0] in _LINEAR

        @functools.wraps(f)
        def function(*args: Any, **kwargs: Any) -> tuple[Any, Callable]:
            # What it calls has no say in its gradient, unless that runs now.
            runs_again = is_linear and now.power is not None
            within = now.outside if runs_again else None
            with context_values.holding(outside=within):
                result, gradient = f(*args, **kwargs)
                return result, _as_now(gradient, block)

        if now.outside is None or is_linear:
            return original(function, args, kwargs)
        given = tf.nest.map_structure(tensors.snapshot, (args, kwargs))
        call = functools.partial(_computed, original, function, block, given)
        result = now.outside(call, _floats(given))
        if result is None:
            _say_scaled(f)
            return original(function, args, kwargs)
        return result[0]

    return record


def _say_scaled(function: Callable) -> None:
    """Says that a function's gradient is scaled."""
    layer, name = layers.running_path(), function.__qualname__
    _messages.warn_once(
        f"the gradient of {name} in layer {layer!r} gets gradients that are "
        "multiplied by a power of two, because a `tf.function` inside the "
        "model calls it. A gradient that clips or takes a sign is then wrong; "
        "call it outside of that `tf.function`",
        about=("scaled gradient", name),
    )


def _computed(
    original: Callable,
    function: Callable,
    block: Block,
    given: Any,
    floats: Sequence,
    is_outside: bool = True,
) -> tuple[list, Callable[[list], list]]:
    """Computes a user's function, which gets unscaled float32 gradients.

    Args:
        original: TensorFlow's recorder of custom gradients.
        function: The user's function. It gets arguments of the given dtypes.
        block: Opens a block with the replacements of the call.
        given: The nest of its arguments and keyword arguments.
        floats: Take the place of the float tensors among them.
        is_outside: Whether they, and so the results, are float32.

    Returns:
        The float tensors of the result, and a function that takes them and
        returns the result in its own dtypes, in a list.
    """
    before = [_dtype(x) for x in tf.nest.flatten(given)]
    dtypes: list = []

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> tuple[Any, Callable]:
        now = tf.nest.flatten((args, kwargs))
        narrow = tf.nest.pack_sequence_as(
            (args, kwargs), [*map(_cast, now, before)]
        )
        result, gradient = function(*narrow[0], **narrow[1])
        dtypes[:] = [x.dtype for x in _floats(result)]
        if is_outside:
            result = _with_floats(
                result, map(tensors.to_float32, _floats(result))
            )

        def again(*upstream: Any, **variables: Any) -> Any:
            wide = tf.nest.pack_sequence_as(
                (args, kwargs), [*map(tensors.to_float32, now)]
            )
            _, of_wide = function(*wide[0], **wide[1])
            return of_wide(*upstream, **variables)

        again = _as_now(again, block, is_float32=True)
        kinds = list(map(_dtype, now))
        return result, _unscaled(gradient, again, kinds, is_outside)

    args, kwargs = _with_floats(given, floats)
    result = original(called, args, kwargs)

    def rebuilt(floats: list) -> list:
        return [_with_floats(result, map(tf.cast, floats, dtypes))]

    return _floats(result), rebuilt


def _unscaled(
    gradient: Callable, again: Callable, dtypes: Sequence, is_outside: bool
) -> Callable:
    """Returns a gradient function for scaled gradients, from one for unscaled.

    Args:
        gradient: The user's gradient function.
        again: The same, of the function that runs again in float32.
        dtypes: The dtypes of the gradients that it returns.
        is_outside: Whether the gradients are unscaled and float32 already.
    """

    def run(*upstream: Any, **variables: Any) -> Any:
        by = context_values.block.get().power
        if by is None and not is_outside:
            return gradient(*upstream, **variables)
        down, up = (None, None) if by is None else (by.down, by.up)
        with context_values.holding(power=None, outside=None):
            entering = [_times(down, tensors.to_float32(x)) for x in upstream]
            try:
                found = gradient(*entering, **variables)
            except Exception as error:
                # It may combine a float32 gradient with 16-bit tensors, which
                # TensorFlow refuses.
                try:
                    found = again(*entering, **variables)
                except Exception:
                    raise error from None
        of_inputs, of_variables = found if variables else (found, [])
        leaving = [
            x if x is None or dtype is None else _times(up, x, dtype)
            for x, dtype in zip(
                tf.nest.flatten(of_inputs), dtypes, strict=False
            )
        ]
        if not variables:
            return leaving
        return leaving, [
            x if x is None else _times(up, x) for x in of_variables
        ]

    # TensorFlow looks for an argument `variables`. mypy does not know this
    # attribute of functions.
    vars(run)["__signature__"] = inspect.signature(gradient)
    return run


def _times(factor: Any, gradient: Any, dtype: Any = None) -> Any:
    """Multiplies a gradient by a power of two in float32, if there is one."""
    if isinstance(gradient, tf.IndexedSlices):
        values = _times(factor, gradient.values, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    result = tf.convert_to_tensor(gradient)
    if factor is not None:
        wide = tensors.to_float32(result)
        result = wide * tf.cast(factor, wide.dtype)
    return _cast(result, dtype)


def _cast(value: Any, dtype: Any) -> Any:
    return value if dtype is None else tf.cast(value, dtype)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if _is_float(leaf) else None


def _floats(nest: Any) -> list:
    return list(filter(_is_float, tf.nest.flatten(nest)))


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor | tf.Variable) and leaf.dtype.is_floating


def _with_floats(nest: Any, floats: Iterable) -> Any:
    """Returns a nest with other float tensors."""
    new = iter(floats)
    return tf.nest.map_structure(
        lambda x: next(new) if _is_float(x) else x, nest
    )


def _as_now(
    gradient: Callable, block: Block, is_float32: bool = False
) -> Callable:
    """Returns a function that runs with the settings of the current call.

    Args:
        gradient: The function.
        block: Opens a block with the replacements of the call.
        is_float32: Whether it reads variables in float32.
    """
    state, settings = global_state.call_state(), contextvars.copy_context()
    if is_float32:
        state = (*state[:2], None)

    def as_called(now: context_values.Block, args: Any, kwargs: Any) -> Any:
        with (
            block(),
            global_state.as_called(state),
            context_values.holding(
                power=now.power, outside=now.outside, asked=now.asked
            ),
        ):
            return gradient(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        now = context_values.block.get()
        # A context cannot be entered twice at a time, as second order would.
        return settings.copy().run(as_called, now, args, kwargs)

    vars(run)["__signature__"] = inspect.signature(gradient)
    return run
