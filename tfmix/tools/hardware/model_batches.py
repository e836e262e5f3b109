"""Describes a model's training batch by shapes and dtypes."""

from typing import Any

import keras
from keras import tree

from tfmix._keras import graphs, training


def inputs(
    model: keras.Model, batch_size: int, input_shape: Any = None
) -> list:
    """Returns symbolic inputs for a model, with a given batch size.

    Their shapes are those that the model was built with, or `input_shape`, the
    shape of one row. Inputs of a subclassed model count as float32.

    Raises:
        ValueError: If the model's input shapes are not known, or do not fit.
    """
    symbols = graphs.symbolic_arguments(model) if model.built else []
    if input_shape is not None:
        symbols = _with_shape(symbols, input_shape)
    if not symbols:
        raise ValueError(
            "The model's input shapes are not known. Received: "
            f"model={model!r}. Call it once on a batch, or pass `input_shape`, "
            "the shape of one row; in a shell `--input-shape`."
        )
    return tree.map_structure(lambda leaf: _fixed(leaf, batch_size), symbols)


def _with_shape(symbols: list, input_shape: Any) -> list:
    """Changes the row shape of all symbolic inputs, or creates an input."""
    shape = tuple(input_shape)
    for leaf in tree.flatten(symbols):
        if len(leaf.shape) != 1 + len(shape):
            raise ValueError(
                "The shape of one row must fit all inputs. Received: "
                f"input_shape={shape!r} for an input with rows of "
                f"{leaf.shape[1:]}. {_advice(leaf.shape[1:])}"
            )
    return list(
        tree.map_structure(
            lambda leaf: keras.KerasTensor((None, *shape), leaf.dtype),
            symbols or [keras.KerasTensor((None, *shape))],
        )
    )


def targets(model: keras.Model, outputs: Any) -> Any:
    """Returns symbolic targets for a model's losses.

    A target has the shape of its output, or holds classes for a loss that is
    sparse by its name. The result is `None` for a model without losses.
    """
    losses = training.losses(model, outputs)
    if not losses:
        return None
    symbols = [
        _target(losses.get(tuple(path)), output)
        for path, output in tree.flatten_with_path(outputs)
    ]
    return tree.pack_sequence_as(outputs, symbols)


def _target(loss: Any, output: Any) -> keras.KerasTensor:
    if "sparse" in str(getattr(loss, "name", "")).lower():
        return keras.KerasTensor(output.shape[:-1], "int32")
    return keras.KerasTensor(output.shape, "float32")


def _fixed(tensor: Any, batch_size: int) -> Any:
    shape = (batch_size, *tensor.shape[1:])
    if None in shape:
        raise ValueError(
            "To count products, every dimension of an input but the first must "
            f"be known. Received: an input of shape {tensor.shape!r}. "
            f"{_advice(shape[1:])}"
        )
    return keras.KerasTensor(shape, tensor.dtype)


def _advice(shape: tuple) -> str:
    """Says how to give the shape of a row."""
    row = tuple(128 if size is None else size for size in shape)
    return (
        f"Write `tfmix.hardware.advise(..., input_shape={row})`, in a shell "
        f"`--input-shape {' '.join(map(str, row))}`, or build the model for "
        "one length, such as keras.Input((128,))."
    )
