"""Compiles a model with the optimizer that the dtypes of its layers need.

`make_compile` replaces Keras's `compile` for every model. It gives models with
16-bit layers their record, however they were made, their optimizer and their
guard.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfmix import _formats
from tfmix._keras import (
    context_values,
    layers,
    optimizers,
    replacing,
    training,
)
from tfmix.autocast import layer_calls, record
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules
from tfmix.optimizers import master_weights, sixteen_bit_optimizer
from tfmix.policy import policy as policies
from tfmix.step import guard

# Says what `compile` should.
_advise: Callable[[keras.Model], None]


def advise_by(advise: Callable[[keras.Model], None]) -> None:
    """Sets what tells of float32 layers and 16-bit results in `compile`."""
    global _advise
    _advise = advise


def make_compile(original: Callable[..., None]) -> Callable[..., None]:
    """Returns the replacement of Keras's `compile` for all models."""

    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        method = functools.partial(original, self)
        _adopt(self)
        is_ours = _has_record(self)
        if is_ours or policies.SIXTEEN_BIT in context_values.active_rules():
            _compile(self, method, args, kwargs)
        else:
            method(*args, **kwargs)

    return compile


def _has_record(model: keras.Model) -> bool:
    return replacing.part(model, replacing.RULES) is not None


def _adopt(model: keras.Model) -> None:
    """Gives a model with 16-bit layers what a policy gives to a new one."""
    policy = _policy_of(model)
    if policy is None:
        return
    for layer in layers.flat_layers(model):
        is_model = isinstance(layer, keras.Model)
        is_attached = replacing.part(layer, replacing.CALL)
        if is_attached or (is_model and _has_record(layer)):
            continue
        layer_calls.attach(layer)
        if is_model and _policy_of(layer):
            record.set_policy(layer, policy)


def _policy_of(model: keras.Model) -> keras.DTypePolicy | None:
    """Returns the policy of a model's record, or that of its layers."""
    for layer in layers.flat_layers(model):
        part = replacing.part(layer, replacing.RULES)
        if part is not None:
            policy: keras.DTypePolicy = part.policy
            return policy
    for dtype in _formats.SIXTEEN_BIT:
        if layers.computes_in(model, dtype):
            pure = layers.has_sixteen_bit_variables(model)
            return policies.Policy(dtype if pure else f"mixed_{dtype}")
    return None


def _compile(
    model: keras.Model,
    original: Callable[..., None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Compiles a model by Keras's method, then changes its optimizer.

    `auto_scale_loss` decides nothing: no loss of a model with a record is
    scaled, and its optimizer has to skip steps.
    """
    part = replacing.part(model, replacing.RULES)
    order = training.ORDERS["compile"]
    given = replacing.argument(order, args, kwargs, "optimizer")
    factor = getattr(given, "loss_scale_factor", None)
    # Keras creates an optimizer here, and computes nothing in 16 bit.
    with context_values.holding(rules=context_values.NO_RULES):
        original(*args, **kwargs)
        optimizer = getattr(model, "optimizer", None)
        if part is not None and optimizer is not None:
            if factor is not None:
                # Keras's scaler drops it without a word, and ours with one.
                given.loss_scale_factor = factor
            optimizer = choose(optimizer, model, part.level)
    if optimizer is not getattr(model, "optimizer", None):
        named = optimizer_in_files(optimizer, model)
        training.adopt_optimizer(model, optimizer, named)
    if part is not None or isinstance(optimizer, scaling.LossScaleOptimizer):
        guard.attach(model)
    if _needs_advice(model):
        _advise(model)


def _needs_advice(model: keras.Model) -> bool:
    return any(
        is_float32_without_policy(layer) or layers.last_activation(layer)
        for layer in layers.that_compute(model)
    )


def is_float32_without_policy(layer: keras.Layer) -> bool:
    """Returns whether a layer is in float32, and no policy made it so."""
    origin = layers.marks(layer).origin
    return layer.compute_dtype == "float32" and origin != layers.DEFAULT


def choose(
    optimizer: keras.optimizers.Optimizer,
    model: keras.Layer,
    level: str | None = None,
) -> keras.optimizers.Optimizer:
    """Wraps an optimizer as a model's dtypes require.

    float16 layers get loss scaling, bfloat16 layers a check that skips steps
    that are not finite, and 16-bit variables float32 master weights. tfmix's
    wrappers stay. If its loss-scale optimizer lacks master weights, they are
    added inside it. Keras's own goes, because it scales a loss that needs no
    scale, and a step that it skips leaves NaN in metrics and statistics.
    """
    pure = layers.has_sixteen_bit_variables(model)
    while type(optimizer) is optimizers.KerasScaler:
        optimizer = optimizer.inner_optimizer
    if isinstance(optimizer, scaling.LossScaleOptimizer):
        if pure:
            _add_masters(optimizer)
        return optimizer
    float16 = layers.computes_in(model, "float16")
    if not float16 and not layers.computes_in(model, "bfloat16"):
        return optimizer
    if pure and not isinstance(
        optimizer, sixteen_bit_optimizer.SixteenBitOptimizer
    ):
        optimizer = _automatic(master_weights.MasterWeightOptimizer(optimizer))
    rule: Any = "dynamic"
    if not float16 or level == "O3":
        # `NoLossScale` still skips steps that are not finite.
        rule = rules.NoLossScale()
    return _automatic(scaling.LossScaleOptimizer(optimizer, loss_scale=rule))


def optimizer_in_files(
    optimizer: keras.optimizers.Optimizer, model: keras.Layer
) -> keras.optimizers.Optimizer:
    """Returns the optimizer that a model's files name.

    It is the user's own, which `choose` wraps again when the file is loaded,
    and which a process without tfmix knows.
    """
    float16 = layers.computes_in(model, "float16")
    chosen = rules.DynamicLossScale if float16 else rules.NoLossScale
    inner = optimizer
    while getattr(inner, "is_automatic", False):
        if not isinstance(getattr(inner, "rule", None), chosen | None):
            # A level decided.
            return optimizer
        inner = inner.inner_optimizer
    return inner


def without_automatic(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Removes what `choose` put around an optimizer, or inside a user's."""
    while getattr(optimizer, "is_automatic", False):
        optimizer = optimizer.inner_optimizer
    inner = vars(optimizer).get("inner_optimizer")
    if getattr(inner, "is_automatic", False):
        optimizer.inner_optimizer = inner.inner_optimizer
    return optimizer


def _automatic(optimizer: Any) -> keras.optimizers.Optimizer:
    optimizer.is_automatic = True
    return optimizer


def _add_masters(optimizer: scaling.LossScaleOptimizer) -> None:
    inner = optimizer.inner_optimizer
    if isinstance(inner, sixteen_bit_optimizer.SixteenBitOptimizer):
        return
    if optimizer.built:
        raise ValueError(
            "A model with 16-bit variables loses every update smaller than "
            "half a step of the format, unless its optimizer keeps float32 "
            f"masters. Received: optimizer={optimizer!r}, which has none and "
            "is built already. Compile with tfmix.LossScaleOptimizer("
            f"tfmix.optimizers.MasterWeightOptimizer({type(inner).__name__}"
            "(...)))."
        )
    optimizer.inner_optimizer = _automatic(
        master_weights.MasterWeightOptimizer(inner)
    )
