"""The settings of a LossScaleOptimizer, checked."""

import inspect
from collections.abc import Iterable
from typing import Any

import keras

from tfmix import _arguments, _formats, _messages
from tfmix.loss_scaling import inner_attributes, rules


def loss_scale_rule(
    loss_scale: Any, initial_scale: Any, dynamic_growth_steps: Any
) -> rules.LossScale:
    """Returns the rule that three constructor arguments describe."""
    given = {} if initial_scale is None else {"initial_scale": initial_scale}
    if dynamic_growth_steps is not None:
        given["growth_steps"] = _arguments.count(
            "dynamic_growth_steps", dynamic_growth_steps
        )
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return rules.DynamicLossScale(**given)
    if given:
        raise ValueError(
            "`initial_scale` and `dynamic_growth_steps` are settings of the "
            "dynamic rule and would be ignored beside another one. Received: "
            f"initial_scale={initial_scale!r}, dynamic_growth_steps="
            f"{dynamic_growth_steps!r}, loss_scale={loss_scale!r}. Write "
            "loss_scale=tfmix.DynamicLossScale(initial_scale=..., "
            "growth_steps=...), or leave the two out."
        )
    if isinstance(loss_scale, rules.LossScale):
        return loss_scale
    if isinstance(loss_scale, keras.optimizers.Optimizer):
        raise TypeError(
            "Optimizers do not share a loss scale any more: each has its own. "
            f"Received: loss_scale={loss_scale!r}. Leave `loss_scale` out, or "
            "give both optimizers the same rule, such as "
            "loss_scale=tfmix.DynamicLossScale(initial_scale=...)."
        )
    if isinstance(loss_scale, str) or loss_scale is None:
        raise ValueError(
            '`loss_scale` must be "dynamic", a positive number or a '
            f"tfmix.loss_scaling.LossScale object. Received: "
            f"loss_scale={loss_scale!r}."
        )
    return rules.FixedLossScale(_arguments.positive("loss_scale", loss_scale))


def refuse_misspelt(given: Iterable[str]) -> None:
    """Refuses what is nearly an argument of `LossScaleOptimizer`."""
    fields = inspect.signature(rules.DynamicLossScale).parameters
    own = "initial_scale dynamic_growth_steps loss_scale reduce_dtype".split()
    meant = {
        "growth_interval": "dynamic_growth_steps",
        **{
            field: f"loss_scale=DynamicLossScale({field}=...)"
            for field in fields
        },
        **{argument: argument for argument in own},
    }
    for name in given:
        if hint := _arguments.did_you_mean(name, meant, cutoff=0.8):
            raise ValueError(
                f"LossScaleOptimizer has no argument `{name}`.{hint}"
            )


def reduce_dtype(dtype: Any, rule: rules.LossScale) -> str | None:
    """Returns the dtype that gradients are summed over replicas in, checked."""
    if dtype is None:
        return None
    if not isinstance(dtype, str) or dtype not in _formats.SIXTEEN_BIT:
        raise ValueError(
            '`reduce_dtype` must be "float16", "bfloat16" or None. Received: '
            f"reduce_dtype={dtype!r}."
        )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "`reduce_dtype` is of the sum that `tf.distribute` makes. Under "
            "JAX the compiler places the sum over a sharded batch, in the "
            f"dtype of the gradients. Received: reduce_dtype={dtype!r} on the "
            f"{keras.backend.backend()!r} backend. Leave it out; in a "
            "`jax.shard_map` of your own write `jax.lax.psum(gradient.astype("
            f'"{dtype}"), axis)` before `stateless_apply`.'
        )
    if dtype == "float16" and isinstance(rule, rules.NoLossScale):
        raise ValueError(
            "Gradients that are summed in float16 must be scaled: those below "
            f"{_formats.FLOAT16.smallest:.1g} become 0. Received: "
            'reduce_dtype="float16" with NoLossScale(). Write reduce_dtype='
            '"bfloat16", or loss_scale="dynamic".'
        )
    return dtype


def drop_unsupported(config: dict) -> None:
    """Drops from an optimizer's config what this backend does not know."""
    if keras.backend.backend() != "tensorflow":
        if dtype := config.pop("reduce_dtype", None):
            _messages.warn(
                "the optimizer was saved with reduce_dtype=%r, which is of the "
                "sum that `tf.distribute` makes; under JAX it is left out.",
                dtype,
            )


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the Keras optimizer to wrap, given as it is or by its name."""
    optimizer = inner_attributes.checked(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` scales the loss already; a second scale would "
            "be divided out twice. Received: inner_optimizer="
            f"{optimizer!r}. Wrap the optimizer inside it: "
            "LossScaleOptimizer(optimizer.inner_optimizer)."
        )
    if optimizer.loss_scale_factor is not None:
        factor = optimizer.loss_scale_factor
        _messages.warn(
            "the fixed loss_scale_factor=%r of %r is replaced by tfmix's loss "
            "scale. To keep it, write LossScaleOptimizer(..., loss_scale=%r).",
            factor,
            optimizer.name,
            factor,
        )
    return optimizer
