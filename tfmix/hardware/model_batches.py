"""The batch that a model would take, as shapes and dtypes."""

from typing import Any

import keras
from keras import tree

from tfmix._keras import layers as host


def inputs(model: keras.Model, batch_size: int) -> list:
    """Returns what to call a built model with, as symbols of one batch size.

    Raises:
        ValueError: If the model's input shapes are not known.
    """
    found = host.symbolic_arguments(model)
    if not found:
        raise ValueError(
            "The model's input shapes are not known. Received: "
            f"model={model!r}. Call it once on a batch."
        )
    return tree.map_structure(lambda one: _fixed(one, batch_size), found)


def targets(outputs: Any, loss: Any) -> Any:
    """Returns what a loss compares outputs with, as symbols.

    Classes for each sparse loss, and for the others what the model returns.
    """
    losses = tree.flatten(loss) if isinstance(loss, dict | list) else [loss]
    many = len(losses) == len(tree.flatten(outputs))
    left = iter(losses if many else [])

    def target(output: Any) -> Any:
        if "sparse" in _name(next(left, losses[0])):
            return keras.KerasTensor(output.shape[:-1], "int32")
        return keras.KerasTensor(output.shape, "float32")

    return tree.map_structure(target, outputs)


def _name(loss: Any) -> str:
    name = loss if isinstance(loss, str) else getattr(loss, "name", None)
    return str(name or getattr(loss, "__name__", "")).lower()


def _fixed(tensor: Any, batch_size: int) -> Any:
    shape = (batch_size, *tensor.shape[1:])
    if None in shape:
        raise ValueError(
            "Every dimension of an input besides the first must be known, to "
            f"count products. Received: an input of shape {tensor.shape!r}. "
            "Build the model for one length, such as keras.Input((128,))."
        )
    return keras.KerasTensor(shape, tensor.dtype)
