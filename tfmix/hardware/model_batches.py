"""The batch that a model would take, as shapes and dtypes."""

import itertools
from typing import Any

import keras
import numpy as np
from keras import tree

from tfmix._keras import layers as host
from tfmix.diagnostics import batch as batches

# Choices of dtypes for the inputs of a model, each traced once.
_MOST_TRIED = 64


def inputs(
    model: keras.Model,
    batch_size: int,
    x: Any = None,
    input_shape: Any = None,
) -> list:
    """Returns what to call a model with, as symbols of one batch size.

    Shapes are those of `x`, a batch or a dataset, or of `input_shape`, that of
    one row; else those the model was built with.

    Raises:
        ValueError: If the model's input shapes are not known, or `x` and
            `input_shape` are both given or do not fit.
    """
    if x is not None and input_shape is not None:
        raise ValueError(
            "The shapes come from `x` or from `input_shape`, not both. "
            f"Received: x={type(x).__name__}, input_shape={input_shape!r}."
        )
    if x is not None:
        x, _ = next(batches.split(x, None))
        symbols = [tree.map_structure(_symbol, x)]
    else:
        symbols = host.symbolic_arguments(model) if model.built else []
        if input_shape is not None:
            symbols = _of_shape(symbols, input_shape)
    if not symbols:
        raise ValueError(
            "The model's input shapes are not known. Received: "
            f"model={model!r}. Call it once on a batch; "
            f"`tfmix.hardware.advise` also "
            "takes `x`, a batch of inputs, or `input_shape`, that of one row."
        )
    symbols = tree.map_structure(lambda leaf: _fixed(leaf, batch_size), symbols)
    if x is not None or not model.built or host.knows_input_dtypes(model):
        return symbols
    return _of_dtypes_that_work(model, symbols)


def _of_dtypes_that_work(model: keras.Model, untyped: list) -> list:
    """Gives inputs of which only shapes are known dtypes a model takes."""
    shapes = [leaf.shape for leaf in tree.flatten(untyped)]
    choices = itertools.product(("float32", "int32"), repeat=len(shapes))
    for dtypes in itertools.islice(choices, _MOST_TRIED):
        leaves = map(keras.KerasTensor, shapes, dtypes)
        symbols = tree.pack_sequence_as(untyped, list(leaves))
        try:
            host.run_on_shapes(model, symbols)
        except Exception as error:
            last = error
            continue
        return list(symbols)
    raise ValueError(
        "A subclassed model does not say of which dtypes its inputs are, and "
        f"takes neither float32 nor int32. Received: model={model!r} and "
        f"inputs of shapes {shapes}. Make them with `inputs = "
        "keras.Input(shape, dtype=dtype)`, and give `keras.Model(inputs, "
        "model(inputs))`."
    ) from last


def _symbol(leaf: Any) -> keras.KerasTensor:
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    return _row_symbol(np.shape(leaf)[1:], dtype)


def _of_shape(known: list, input_shape: Any) -> list:
    """Gives the known inputs, or one that is not known, the shape of a row."""
    made = tree.map_shape_structure(_row_symbol, input_shape)
    if not known:
        return [made]
    leaves = tree.flatten(known)
    given = [symbol.shape[1:] for symbol in tree.flatten(made)]
    shapes = given * len(leaves) if len(given) == 1 else given
    wanted = [tuple(leaf.shape[1:]) for leaf in leaves]
    if list(map(len, shapes)) != list(map(len, wanted)):
        raise ValueError(
            "`input_shape` must be the shape of one row, for all inputs or "
            f"for each. Received: input_shape={input_shape!r} for inputs with "
            f"rows of {', '.join(map(str, wanted))}."
        )
    symbols = map(_row_symbol, shapes, [leaf.dtype for leaf in leaves])
    return list(tree.pack_sequence_as(known, list(symbols)))


def _row_symbol(shape: Any, dtype: Any = "float32") -> keras.KerasTensor:
    return keras.KerasTensor((None, *shape), dtype)


def targets(model: keras.Model, outputs: Any) -> Any:
    """Returns what a model's losses compare outputs with, as symbols.

    Of the form of an output, or its classes where the loss takes only those;
    `None` without a loss.

    Raises:
        ValueError: If a loss takes neither.
    """
    losses = host.losses(model, outputs)
    if not losses:
        return None
    symbols = [
        _target(losses.get(tuple(path)), output)
        for path, output in tree.flatten_with_path(outputs)
    ]
    return tree.pack_sequence_as(outputs, symbols)


def _target(loss: Any, output: Any) -> keras.KerasTensor:
    alike = keras.KerasTensor(output.shape, "float32")
    if loss is None:
        return alike
    kinds = [alike, keras.KerasTensor(output.shape[:-1], "int32")]
    # A function of the user's may take both, and make of one much too much.
    if "sparse" in str(loss.name).lower():
        kinds.reverse()
    for kind in kinds:
        try:
            host.run_on_shapes(loss, [kind, output])
        except Exception as error:
            last = error
            continue
        return kind
    raise ValueError(
        "A loss must take targets of its output's form, or classes, to be "
        f"compiled. Received: {loss.name!r}, which takes none of "
        f"{[(kind.shape, kind.dtype) for kind in kinds]}. Give another, such "
        "as loss='mean_squared_error', to see what the rest of the step takes."
    ) from last


def _fixed(tensor: Any, batch_size: int) -> Any:
    shape = (batch_size, *tensor.shape[1:])
    if None in shape:
        example = tuple(128 if size is None else size for size in shape[1:])
        raise ValueError(
            "Every dimension of an input besides the first must be known, to "
            f"count products. Received: an input of shape {tensor.shape!r}. "
            "Build the model for one length, such as keras.Input((128,)); "
            "`tfmix.hardware.advise` also takes `x`, a batch of inputs, or "
            f"input_shape={example!r}."
        )
    return keras.KerasTensor(shape, tensor.dtype)
