"""The loss scale to start with: the largest that does not overflow."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import keras
from keras import ops

from tfmix import _arguments, _errors, _progress
from tfmix.conversion import planned_policies
from tfmix.doctor import batch as batches
from tfmix.doctor import differentiation, programs
from tfmix.in_force.model import model_border
from tfmix.step import finite

# The exponents that are tried: the bounds of `DynamicLossScale`.
_LOWEST, _HIGHEST = 0, 24
# A dataset may repeat without end, and more batches tell little.
_BATCHES = 32


def calibrate_loss_scale(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    batch_size: int = 32,
    margin_bits: int = 4,
) -> float:
    """Finds the largest loss scale at which no gradient overflows.

    For loops that scale a loss of their own code. A Keras model under a tfmix
    policy needs none: its gradients are scaled inside it, by a power of two
    that each backward pass finds anew.

    Start training with it, `LossScaleOptimizer("adam", initial_scale=...)`,
    and no step is spent on the search for one. Forward and backward pass run
    in the model's dtypes; nothing is applied, and weights, statistics and
    random seeds stay as they are.

    Args:
        model: A `keras.Model`.
        x: Inputs, an array or a nest of arrays, or a `tf.data.Dataset` of
            batches. The first 32 batches are tried, one by one.
        y: Targets; they come with `x` where that is a dataset.
        loss: As for `compile`. Defaults to the compiled loss.
        batch_size: Integer, rows of a batch, as in training. Defaults to 32.
            A dataset keeps its own batches.
        margin_bits: Integer, bits left free for batches that were not tried.
            Defaults to 4: in the first 200 steps of six models, three seeds
            each, gradients came to at most 8 times those at the start. 0
            gives the largest itself.

    Returns:
        A power of two from 1 to 2**24; 1 for a model without float16 layers,
        which needs no loss scaling.

    Raises:
        TypeError: If `model` is no Keras model or a number no integer.
        ValueError: If there is no loss or no targets, or a number is too low.
        tfmix.LossScaleError: If gradients are not finite at any scale.

    Examples:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> x, y = np.ones((4, 2)), np.ones((4, 1))
        >>> calibrate_loss_scale(model, x, y, loss="mse")
        1.0
    """
    rows = _arguments.count("batch_size", batch_size, example=32)
    margin = _arguments.count("margin_bits", margin_bits, lowest=0, example=4)
    several = batches.split(x, y, rows)
    first = next(several, (x, y))
    whole = batches.prepare(model, *first, loss)
    _refuse_no_loss(whole)
    sixteen = planned_policies.sixteen_bit_layers(model)
    if all(layer.compute_dtype != "float16" for layer in sixteen):
        return 1.0
    is_finite = _compiled(whole)
    best = _HIGHEST
    others = itertools.islice(several, _BATCHES - 1)
    with _progress.shown("Calibrating") as say:
        for index, part in enumerate(itertools.chain([first], others)):
            say(f"Calibrating: batch {index + 1} of at most {_BATCHES}")
            x, y = batches.tensors(part)
            fits = functools.partial(is_finite, x, y)
            if not fits(_LOWEST):
                _refuse(dataclasses.replace(whole, x=x, y=y), index)
            best = _largest(fits, best)
    return 2.0 ** max(best - margin, _LOWEST)


def _refuse_no_loss(batch: batches.Batch) -> None:
    if batch.loss is None and batch.run(batch.weights())[1] is None:
        raise ValueError(
            "Gradients need a loss: the model adds none, and there are no "
            "targets. Received: y=None. Pass the targets that the model is "
            "trained on, in the dataset if `x` is one."
        )


def _largest(fits: Callable[[int], bool], highest: int) -> int:
    """Returns the largest exponent that fits, found by halving.

    The lowest does.
    """
    if fits(highest):
        return highest
    above = range(_LOWEST + 1, highest)
    fitting = bisect.bisect_left(
        above, True, key=lambda exponent: not fits(exponent)
    )
    return _LOWEST + fitting


def _refuse(batch: batches.Batch, index: int) -> NoReturn:
    bad = batch.bad_rows()
    why = "tfmix.check(model, x, y) names the layer."
    if bad:
        held = " and ".join(
            f"`{name}` holds NaN or infinity in {batches.shown(rows)}"
            for name, rows in bad.items()
        )
        why = f"Of this batch {held}: fix the data first."
    raise _errors.LossScaleError(
        f"The gradients of batch {index} are not finite at a loss scale of 1, "
        f"so no scale can make them so. {why}"
    )


def _compiled(whole: batches.Batch) -> Callable[[Any, Any, int], bool]:
    """Compiles whether all gradients of one batch are finite at a scale."""

    def step(weights: list[Any], x: Any, y: Any, scale: Any) -> Any:
        part = batches.Batch(whole.model, x, y, whole.loss)
        with model_border.left_out():
            (scaled,), back = differentiation.pullback(
                lambda values: [part.run(values)[1] * scale], weights
            )
        return finite.all_finite([scaled, *back([ops.ones_like(scaled)])])

    run = programs.compiled(step)

    def is_finite(x: Any, y: Any, power: int) -> bool:
        tensor = ops.convert_to_tensor(2.0**power, "float32")
        return bool(run(whole.weights(), x, y, tensor))

    return is_finite
