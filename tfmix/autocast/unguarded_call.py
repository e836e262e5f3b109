"""A call in training outside of a guard: a bad batch leaves no NaN behind.

The optimizer's step is skipped, but BatchNormalization has written by then. In
a guarded `fit` the whole step is taken back (`scaling/guard.py`); in a loop of
one's own, or with several optimizers, nobody knows when the step is over.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from tfmix._keras import compilation, layers, model_methods
from tfmix.loss_scaling import apply_if_finite


def kept_finite(
    model: keras.Model, call: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Calls a model in training; takes back what it wrote if that is NaN.

    Args:
        model: The model. One that is guarded is only called.
        call: What calls it.
        *args: Positional arguments of the call.
        **kwargs: Keyword arguments of the call.

    Returns:
        What `call` returns. If a number of a float variable that is not
        trained was finite before and is not now, all of these variables have
        their old values.
    """
    training = kwargs.get("training")
    if training is None:
        training = layers.is_training()
    guarded = model_methods.part(model, model_methods.GUARD) is not None
    if guarded or not training:
        return call(*args, **kwargs)
    unlisted = layers.unlisted_variables(model)
    variables = [
        variable
        for variable in [*model.non_trainable_variables, *unlisted]
        if _is_float(variable)
    ]
    # As they are stored, not as layers in 16 bit read them.
    with layers.autocast(None):
        before = [compilation.read(variable) for variable in variables]
    outputs = call(*args, **kwargs)
    with layers.autocast(None):
        _restore_if_lost(variables, before)
    return outputs


def _restore_if_lost(variables: list[keras.Variable], before: list) -> None:
    written = apply_if_finite.written(zip(variables, before, strict=True))
    if not written:
        return
    lost = [
        ops.reshape(_is_lost(old, compilation.read(variable)), (-1,))
        for variable, old in written
    ]
    is_bad = ops.any(ops.concatenate(lost))
    apply_if_finite.put_back(ops.logical_not(is_bad), written)


def _is_float(variable: Any) -> bool:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return bool(keras.backend.is_float_dtype(dtype))


def _is_lost(old: Any, new: Any) -> Any:
    was_finite = ops.isfinite(old)
    return ops.logical_and(was_finite, ops.logical_not(ops.isfinite(new)))
