"""Exports float32 weights of 16-bit models, and loads them, without loss."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix import _arguments
from tfmix._keras import optimizers, replacing, variables
from tfmix.optimizers import sixteen_bit_optimizer


def export_float32(model: keras.Model, path: Any = None) -> list[np.ndarray]:
    """Returns a 16-bit model's weights in float32, from masters if it has any.

    Use it to continue in float32, or to publish weights with all their bits.

    Args:
        model: A built Keras model.
        path: File name that ends in `.weights.h5`. The weights are written to
            it as by `save_weights` of a float32 model. Defaults to `None`: no
            file.

    Returns:
        A list of arrays on the host, in the order of `model.weights`. You can
        pass it to `set_weights` of the same model in float32. Weights that
        are not 16-bit, such as a quantized layer's, keep their dtype.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If the model is not built.

    Examples:
        >>> model = keras.Sequential([keras.layers.Dense(1, dtype="bfloat16")])
        >>> model.build((None, 2))
        >>> [str(array.dtype) for array in export_float32(model)]
        ['float32', 'float32']
    """
    _check_model(model)
    owner = sixteen_bit_optimizer.owner(getattr(model, "optimizer", None))
    values = []
    for value in model.weights:
        if owner is not None and _owns(owner, value):
            value = owner.read_float32(value)
        elif variables.is_narrow(value):
            value = ops.cast(value, "float32")
        values.append(ops.convert_to_numpy(value))
    if path is not None:
        with _float32_storage(model):
            model.set_weights(values)
            model.save_weights(path)
    return values


def load_float32(model: keras.Model, source: Any) -> None:
    """Loads float32 weights into a 16-bit model and its masters.

    Use it instead of `load_weights` or `set_weights` to start from a float32
    checkpoint. These would round the weights to 16 bits before they reach the
    masters.

    Args:
        model: A built Keras model, compiled with a `MasterWeightOptimizer` or
            a `BFloat16Optimizer`, also inside a loss-scale optimizer.
        source: File name that `load_weights` accepts, or a list of arrays as
            `get_weights` of the float32 model returns it.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If the model is not built, or has no such optimizer.
    """
    _check_model(model)
    owner = sixteen_bit_optimizer.owner(getattr(model, "optimizer", None))
    if owner is None:
        raise ValueError(
            "The model cannot store more than 16 bits per weight. Received: a "
            f"model with optimizer={getattr(model, 'optimizer', None)!r}. "
            "Compile it with tfmix.optimizers.MasterWeightOptimizer (or "
            "BFloat16Optimizer) first, or call load_weights if 16 bits are "
            "enough."
        )
    if not owner.built:
        model.optimizer.build(model.trainable_variables)
    with _float32_storage(model):
        is_list = isinstance(source, list | tuple)
        (model.set_weights if is_list else model.load_weights)(source)
        values = [np.array(array, copy=True) for array in model.get_weights()]
    for variable, value in zip(model.weights, values, strict=True):
        if _owns(owner, variable):
            owner.assign_float32(variable, value)
        else:
            variable.assign(value)


def _check_model(model: keras.Model) -> None:
    """Raises an error for a model without weights."""
    _arguments.model(model)
    if not model.built:
        raise ValueError(
            "The model has no weights yet. Received: model="
            f"{model.name!r}. Call it on a batch, or model.build(shape)."
        )


def _owns(owner: Any, variable: keras.Variable) -> bool:
    """Returns whether an optimizer was built with a variable."""
    owned = optimizers.remembered(owner) if owner and owner.built else ()
    return any(variable is own for own in owned)


@contextlib.contextmanager
def _float32_storage(model: keras.Model) -> Iterator[None]:
    """Makes 16-bit variables store float32, to read or write a file."""
    # Every variable stores its value elsewhere meanwhile, so a file that does
    # not fit changes nothing. A weights file holds no optimizer state, so the
    # model has no optimizer meanwhile.
    with contextlib.ExitStack() as undo:
        for variable in model.weights:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            wide = "float32" if variables.is_narrow(variable) else dtype
            variables.store_apart(undo, variable, wide)
        if "optimizer" in vars(model):
            replacing.swap(undo, model, "optimizer", None)
        yield
