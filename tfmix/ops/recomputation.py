"""Runs users' gradient code with unscaled gradients, in the layer's settings.

The gradient of a `tf.custom_gradient` is the user's code and runs after the
layer's call. Its variables would be read in float32, and no rule would be
active. `tf.recompute_grad` (`keras.remat`, `keras.RematScope`) is such a
function: it runs the layer's own code again.

A user's gradient need not grow with what comes in: it may clip, or take the
sign. In a float16 model it computes in float32, and gets what comes in there
unscaled.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from tfmix._formats import SIXTEEN_BIT
from tfmix._keras import context, replacing, tapes
from tfmix._keras import variables as keras_variables
from tfmix.ops import tensors

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf


def alike(original: Callable) -> Callable:
    """Returns a recorder of custom gradients that keeps the call's settings.

    Args:
        original: TensorFlow's recorder. It calls a user's function, which
            returns a result and its gradient function.
    """

    @functools.wraps(original)
    def record(f: Callable, args: Any, kwargs: Any) -> Any:
        now = context.block.get()
        is_linear = tapes.is_linear(f)
        # What it calls has no say in its gradient, unless that runs now.
        runs_again = is_linear and now.power is not None
        within = now.gates if runs_again else None
        is_users = now.gates is not None and not is_linear
        unscales = is_users and now.gates == tapes.function()
        if is_users and not unscales:
            tapes.say_scaled()

        @functools.wraps(f)
        def function(*args: Any, **kwargs: Any) -> tuple[Any, Callable]:
            with context.holding(gates=within):
                result, gradient = f(*args, **kwargs)
                return result, _as_now(gradient, unscales, args)

        if unscales:
            return _in_float32(original, function, args, kwargs)
        return original(function, args, kwargs)

    return record


def _in_float32(
    original: Callable, function: Callable, args: Any, kwargs: Any
) -> Any:
    """Records a user's function in float32, whose gradient is unscaled.

    Its result has the dtypes that it would have.
    """
    given = tf.nest.map_structure(keras_variables.read_by_layer, (args, kwargs))
    narrow = [x.dtype for x in tf.nest.flatten(given) if tensors.is_16_bit(x)]
    state = context.call_state()

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> tuple[Any, Callable]:
        # It reads variables in float32, too.
        with context.as_called((*state[:2], None)):
            made: tuple[Any, Callable] = function(*args, **kwargs)
        return made

    wide, keywords = tf.nest.map_structure(tensors.to_float32, given)
    result = original(called, wide, keywords)
    if not narrow:
        return result
    return tf.nest.map_structure(
        lambda x: tensors.narrow(x, narrow[0].name), result
    )


def _times(factor: Any, gradients: Any) -> Any:
    """Multiplies gradients, dense or sparse, by a power of two."""

    def scaled(part: Any) -> Any:
        if part is None:
            return None
        wide = tensors.to_float32(tf.convert_to_tensor(part))
        is_float = wide.dtype.is_floating
        return wide * tf.cast(factor, wide.dtype) if is_float else wide

    return tf.nest.map_structure(scaled, gradients, expand_composites=True)


def _as_now(gradient: Callable, unscales: bool, inputs: Any) -> Callable:
    """Returns a function that runs with the settings of the current call.

    Args:
        gradient: The function.
        unscales: Whether the function gets unscaled gradients. It returns the
            user's, which are scaled again.
        inputs: What it returns gradients of. A wide op makes them float32, and
            a tape adds those of one input, which share its dtype.
    """
    state, settings = context.call_state(), context.block.get()
    rules = context.active_rules()
    dtypes = [*map(tensors.float_dtype, tf.nest.flatten(inputs))]

    def narrowed(gradients: Any) -> Any:
        flat = tf.nest.flatten(gradients)
        if len(flat) != len(dtypes):
            return gradients
        pairs = zip(flat, dtypes, strict=True)
        narrow = [
            tensors.narrow(x, dtype) if dtype in SIXTEEN_BIT else x
            for x, dtype in pairs
        ]
        return tf.nest.pack_sequence_as(gradients, narrow)

    def run(*upstream: Any, **variables: Any) -> Any:
        now = context.block.get()
        by = now.power if unscales else None
        if by is not None:
            upstream = _times(by.down, upstream)
        power = None if unscales else now.power
        held = {"rules": rules, "power": power, "gates": now.gates}
        with (
            replacing.block(**{**vars(settings), **held}),
            context.as_called(state),
        ):
            found = gradient(*upstream, **variables)
        found = (narrowed(found[0]), found[1]) if variables else narrowed(found)
        return found if by is None else _times(by.up, found)

    # TensorFlow looks for an argument `variables`. mypy does not know this
    # attribute of functions.
    vars(run)["__signature__"] = inspect.signature(gradient)
    return run
