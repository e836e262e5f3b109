"""Which optimizer a model needs: decided from the dtypes of its layers."""

from typing import Any

import keras
from absl import logging

from tfmix import _formats
from tfmix.scaling import optimizer as scaling
from tfmix.scaling import rules
from tfmix.variables import base as sixteen_bit
from tfmix.variables import master

# Set on the wrappers that tfmix puts on by itself, and so may take off.
PUT_ON = "_tfmix_put_on"


def computing_layers(model: Any) -> list[Any]:
    """Lists the layers of a model that compute something, at any depth.

    Functional and Sequential models only pass tensors on, whatever their own
    dtype policy says; a subclassed model may compute in its `call`.

    Args:
        model: A Keras layer or model.

    Returns:
        The layers, each once.
    """
    return [
        layer
        for layer in model._flatten_layers()
        if not isinstance(layer, keras.layers.InputLayer)
        and not is_graph(layer)
    ]


def is_graph(model: Any) -> bool:
    """Says whether a model is Functional or Sequential."""
    names = {base.__name__ for base in type(model).__mro__}
    return bool(names & {"Functional", "Sequential"})


def computes_in(model: Any, dtype: str) -> bool:
    """Says whether any layer of a model computes in a dtype."""
    return any(
        layer.compute_dtype == dtype for layer in computing_layers(model)
    )


def has_sixteen_bit_variables(model: Any) -> bool:
    """Says whether a model keeps, or will keep, variables in 16 bit."""
    return any(
        layer.variable_dtype in _formats.SIXTEEN_BIT
        for layer in computing_layers(model)
    )


def suited(optimizer: Any, model: Any, level: str | None = None) -> Any:
    """Returns an optimizer with what a model's dtypes call for around it.

    float16 layers get loss scaling, 16-bit variables get float32 masters.
    What is there already stays; an optimizer that scales the loss is returned
    as it is.

    Args:
        optimizer: A Keras optimizer.
        model: The model it will train.
        level: The level the model was made at; `"O3"` asks for no loss
            scaling. Defaults to `None`.

    Returns:
        The optimizer itself or a wrapper around it.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    float16 = computes_in(model, "float16")
    pure = has_sixteen_bit_variables(model)
    if not float16 and not pure:
        return optimizer
    fixed = optimizer.loss_scale_factor
    if fixed is not None:
        # Two scales would be divided out twice. The optimizer stays the
        # user's own object: a copy would ignore a later change of its rate.
        optimizer.loss_scale_factor = None
        logging.info(
            "tfmix: the fixed loss_scale_factor=%r of %r is now "
            "LossScaleOptimizer(..., loss_scale=%r), which also skips steps "
            "that are not finite.",
            fixed,
            optimizer.name,
            fixed,
        )
    if pure and not isinstance(optimizer, sixteen_bit.SixteenBitOptimizer):
        optimizer = master.MasterWeightOptimizer(optimizer)
        object.__setattr__(optimizer, PUT_ON, True)
    scaled = scaling.LossScaleOptimizer(
        optimizer, loss_scale=_rule(fixed, float16, level)
    )
    object.__setattr__(scaled, PUT_ON, True)
    return scaled


def _rule(fixed: float | None, float16: bool, level: str | None) -> Any:
    if fixed is not None:
        return rules.FixedLossScale(float(fixed))
    if not float16 or level == "O3":
        # The check for non-finite gradients stays.
        return rules.NoLossScale()
    return "dynamic"
