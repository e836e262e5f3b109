"""Describes a model's training batch by shapes and dtypes."""

import itertools
from typing import Any

import keras
import numpy as np
from keras import tree

from tfmix._keras import graphs, training
from tfmix.tools.diagnostics import batch as batches

# At most so many combinations of input dtypes are tried, each traced once.
_MOST_TRIED = 64


class InputShapeError(ValueError):
    """Raised if the shape of an input is not known, or does not fit.

    Attributes:
        text: The message without the advice, which names Python's arguments.
        example: The shape of a row that would do.
    """

    def __init__(self, text: str, advice: str, example: tuple) -> None:
        super().__init__(f"{text} {advice}".rstrip())
        self.text = text
        self.example = tuple(128 if size is None else size for size in example)


def inputs(
    model: keras.Model,
    batch_size: int,
    x: Any = None,
    input_shape: Any = None,
) -> list:
    """Returns symbolic inputs for a model, with a given batch size.

    The shapes are those of `x`, a batch or a dataset, or `input_shape`, the
    shape of one row; by default those that the model was built with.

    Raises:
        ValueError: If the model's input shapes are not known, if `x` and
            `input_shape` are both given, or if they do not fit.
    """
    if x is not None and input_shape is not None:
        raise ValueError(
            "The shapes come from `x` or from `input_shape`, not both. "
            f"Received: x={type(x).__name__}, input_shape={input_shape!r}."
        )
    if x is not None:
        x, _ = batches.first(x, None)
        symbols = [tree.map_structure(_symbol, x)]
    else:
        symbols = graphs.symbolic_arguments(model) if model.built else []
        if input_shape is not None:
            symbols = _with_shape(symbols, input_shape)
    if not symbols:
        raise InputShapeError(
            "The model's input shapes are not known. Received: "
            f"model={model!r}.",
            "Call it once on a batch; `tfmix.hardware.advise` also takes `x`, "
            "a batch of inputs, or `input_shape`, that of one row.",
            (None,),
        )
    symbols = tree.map_structure(lambda leaf: _fixed(leaf, batch_size), symbols)
    if x is not None or not model.built or graphs.knows_input_dtypes(model):
        return symbols
    return _with_accepted_dtypes(model, symbols)


def _with_accepted_dtypes(model: keras.Model, untyped: list) -> list:
    """Finds dtypes that a model accepts for inputs of known shapes."""
    shapes = [leaf.shape for leaf in tree.flatten(untyped)]
    choices = itertools.product(("float32", "int32"), repeat=len(shapes))
    for dtypes in itertools.islice(choices, _MOST_TRIED):
        leaves = map(keras.KerasTensor, shapes, dtypes)
        symbols = tree.pack_sequence_as(untyped, list(leaves))
        try:
            graphs.run_on_shapes(model, symbols)
        except Exception as error:
            last = error
            continue
        return list(symbols)
    raise ValueError(
        "The input dtypes of a subclassed model are unknown, and it accepts "
        f"neither float32 nor int32. Received: model={model!r} and inputs of "
        f"shapes {shapes}. Create `inputs = keras.Input(shape, dtype=dtype)`, "
        "and pass `keras.Model(inputs, model(inputs))`."
    ) from last


def _symbol(leaf: Any) -> keras.KerasTensor:
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    return _row_symbol(np.shape(leaf)[1:], dtype)


def _with_shape(symbols: list, input_shape: Any) -> list:
    """Changes the row shapes of symbolic inputs, or creates an input."""
    rows = tree.map_shape_structure(_row_symbol, input_shape)
    if not symbols:
        return [rows]
    leaves = tree.flatten(symbols)
    shapes = [row.shape[1:] for row in tree.flatten(rows)]
    shapes = shapes * len(leaves) if len(shapes) == 1 else shapes
    expected = [tuple(leaf.shape[1:]) for leaf in leaves]
    if list(map(len, shapes)) != list(map(len, expected)):
        raise InputShapeError(
            "The shape of one row must fit all inputs, or there is one for "
            f"each. Received: input_shape={input_shape!r} for inputs with "
            f"rows of {', '.join(map(str, expected))}.",
            "",
            expected[0],
        )
    changed = map(_row_symbol, shapes, [leaf.dtype for leaf in leaves])
    return list(tree.pack_sequence_as(symbols, list(changed)))


def _row_symbol(shape: Any, dtype: Any = "float32") -> keras.KerasTensor:
    return keras.KerasTensor((None, *shape), dtype)


def targets(model: keras.Model, outputs: Any) -> Any:
    """Returns symbolic targets for a model's losses.

    A target has the shape of its output, or holds classes if the loss only
    accepts classes. The result is `None` for a model without losses.

    Raises:
        ValueError: If a loss accepts neither.
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
    alike = keras.KerasTensor(output.shape, "float32")
    if loss is None:
        return alike
    kinds = [alike, keras.KerasTensor(output.shape[:-1], "int32")]
    # A custom loss may accept both, and compute far too much for one of them.
    if "sparse" in str(loss.name).lower():
        kinds.reverse()
    for kind in kinds:
        try:
            graphs.run_on_shapes(loss, [kind, output])
        except Exception as error:
            last = error
            continue
        return kind
    raise ValueError(
        "To be compiled, a loss must accept targets of its output's shape, or "
        f"classes. Received: {loss.name!r}, which accepts none of "
        f"{[(kind.shape, kind.dtype) for kind in kinds]}. Pass another, such "
        "as loss='mean_squared_error', to compile the rest of the step."
    ) from last


def _fixed(tensor: Any, batch_size: int) -> Any:
    shape = (batch_size, *tensor.shape[1:])
    if None in shape:
        raise InputShapeError(
            "To count products, every dimension of an input but the first must "
            f"be known. Received: an input of shape {tensor.shape!r}.",
            "Build the model for one length, such as keras.Input((128,)); "
            "`tfmix.hardware.advise` also takes `x`, a batch of inputs, or "
            f"input_shape={tuple(128 if n is None else n for n in shape[1:])}.",
            shape[1:],
        )
    return keras.KerasTensor(shape, tensor.dtype)
