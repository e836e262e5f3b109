"""Decides from the dtypes of a model's layers which optimizer it needs."""

from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import optimizers
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules
from tfmix.optimizers import master_weights, sixteen_bit_optimizer
from tfmix.policy import layer_dtypes


def choose(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Layer,
    level: str | None = None,
) -> keras.optimizers.Optimizer:
    """Wraps an optimizer as a model's dtypes require.

    float16 layers get loss scaling, bfloat16 layers a check that skips steps
    that are not finite, and 16-bit variables float32 master weights. Existing
    wrappers stay. If tfmix's loss-scale optimizer lacks master weights, they
    are added inside it.
    """
    pure = layer_dtypes.has_sixteen_bit_variables(model)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if pure:
            _add_masters(optimizer)
        return optimizer
    float16 = layer_dtypes.computes_in(model, "float16")
    if not float16 and not layer_dtypes.computes_in(model, "bfloat16"):
        return optimizer
    fixed = optimizer.loss_scale_factor
    if fixed is not None:
        # Otherwise gradients would be divided twice. The user's own object is
        # changed, because a copy would ignore later changes of the learning
        # rate.
        optimizer.loss_scale_factor = None
        _messages.info(
            "the fixed loss_scale_factor=%r of %r is now "
            "LossScaleOptimizer(..., loss_scale=%r), which also skips steps "
            "that are not finite.",
            fixed,
            optimizer.name,
            fixed,
        )
    if pure and not isinstance(
        optimizer, sixteen_bit_optimizer.SixteenBitOptimizer
    ):
        optimizer = _automatic(master_weights.MasterWeightOptimizer(optimizer))
    rule: Any = "dynamic"
    if fixed is not None:
        rule = rules.FixedLossScale(float(fixed))
    elif not float16 or level == "O3":
        # `NoLossScale` still skips steps that are not finite.
        rule = rules.NoLossScale()
    return _automatic(scaling.LossScaleOptimizer(optimizer, loss_scale=rule))


def saved(
    optimizer: keras.optimizers.Optimizer, model: keras.Layer
) -> keras.optimizers.Optimizer:
    """Returns the optimizer that a model's files name.

    It is the user's own, which `choose` wraps again when the file is loaded,
    and which a process without tfmix knows.
    """
    float16 = layer_dtypes.computes_in(model, "float16")
    chosen = rules.DynamicLossScale if float16 else rules.NoLossScale
    inner = optimizer
    while getattr(inner, "is_automatic", False):
        if not isinstance(getattr(inner, "rule", None), chosen | None):
            # A factor of the user's or a level decided.
            return optimizer
        inner = inner.inner_optimizer
    return inner


def refuse_two_scales(given: Any) -> None:
    """Raises an error if a loss scale is inside another."""
    if not isinstance(given, keras.optimizers.Optimizer):
        return
    scalers = [
        optimizer
        for optimizer in optimizers.chain(given)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    ]
    if len(scalers) > 1:
        raise ValueError(
            "`optimizer` holds two loss scales, one inside the other: the "
            "gradients are divided by both, but the loss is multiplied only by "
            f"the outer one. Received: optimizer={given!r} around "
            f"{scalers[1]!r}. Remove the outer one: "
            "`compile(optimizer.inner_optimizer, ...)`."
        )


def without_automatic(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Removes what `choose` put around an optimizer, or inside a user's."""
    fixed = None
    while getattr(optimizer, "is_automatic", False):
        rule = getattr(optimizer, "rule", None)
        if isinstance(rule, rules.FixedLossScale):
            # The scale comes from the factor that the user gave the optimizer.
            fixed = rule.scale
        optimizer = optimizer.inner_optimizer
    if fixed is not None:
        optimizer.loss_scale_factor = fixed
    inner = vars(optimizer).get("inner_optimizer")
    if getattr(inner, "is_automatic", False):
        optimizer.inner_optimizer = inner.inner_optimizer
    return optimizer


def _automatic(optimizer: Any) -> keras.optimizers.Optimizer:
    optimizer.is_automatic = True
    return optimizer


def _add_masters(optimizer: keras.optimizers.LossScaleOptimizer) -> None:
    inner = optimizer.inner_optimizer
    if isinstance(inner, sixteen_bit_optimizer.SixteenBitOptimizer):
        return
    ours = isinstance(optimizer, scaling.LossScaleOptimizer)
    if not ours or optimizer.built:
        name = type(inner).__name__
        state = "is built already" if ours else "is Keras's own"
        raise ValueError(
            "A model with 16-bit variables loses every update smaller than "
            "half a step of the format, unless its optimizer keeps float32 "
            f"masters. Received: optimizer={optimizer!r}, which has none and "
            f"{state}. Compile with tfmix.LossScaleOptimizer("
            f"tfmix.optimizers.MasterWeightOptimizer({name}(...)))."
        )
    optimizer.inner_optimizer = _automatic(
        master_weights.MasterWeightOptimizer(inner)
    )
