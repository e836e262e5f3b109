"""An optimizer that nobody wrapped skips the steps that are not finite, too.

In loops without `compile`, and in models with several optimizers.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from tfmix import _context_values, _messages
from tfmix._keras import compilation, optimizers
from tfmix._keras import variables as keras_variables
from tfmix.scaling import optimizer as scaling
from tfmix.scaling import rules, standstill
from tfmix.scaling.border import power
from tfmix.step import finite, replicas
from tfmix.variables import sixteen_bit_optimizer

# Where gradients are applied that no scaler has looked at.
PLACES = (
    optimizers.APPLY,
    (sixteen_bit_optimizer.SixteenBitOptimizer, "apply"),
)
# The `apply` that skips for an optimizer under TensorFlow, `None` for one that
# is left alone.
_SKIPPING = "_tfmix_skipping_apply"
# What counts the skipped steps of an optimizer under JAX.
_WATCH = "_tfmix_watch"
# Whether a skipping `apply` is around the caller. Replicas, each in a thread of
# its own, take turns.
_stepping: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "tfmix_stepping", default=False
)


def applying(original: Callable, holds: Callable[[], bool]) -> Callable:
    """Returns what stands in for an `apply` of `PLACES`."""
    on_tensorflow = keras.backend.backend() == "tensorflow"
    skipping = _on_tensorflow if on_tensorflow else _on_jax

    @functools.wraps(original)
    def apply(
        self: Any, grads: Sequence, trainable_variables: Any = None
    ) -> Any:
        alone = not self.loss_scale_factor and not optimizers.is_wrapped(self)
        alone = alone and not _stepping.get()
        is_mine = alone and vars(self).get(_SKIPPING, original)
        if len(grads) and is_mine and holds():
            _tell_of_lost_updates(self, trainable_variables)
            return skipping(self, original, grads, trainable_variables)
        return original(self, grads, trainable_variables)

    return apply


def _tell_of_lost_updates(optimizer: Any, variables: Any) -> None:
    """Warns of 16-bit variables that are updated without float32 masters."""
    if isinstance(optimizer, sixteen_bit_optimizer.SixteenBitOptimizer):
        return
    if variables is None:
        variables = optimizers.remembered(optimizer)
    if any(map(keras_variables.is_narrow, variables)):
        _messages.warn_once(
            "a Keras optimizer updates 16-bit variables without float32 "
            "masters: what is smaller than half a step of the format is lost, "
            "and Adam's epsilon is 0 in float16. Write "
            f"tfmix.MasterWeightOptimizer({type(optimizer).__name__}(...)), or "
            "take a 'mixed_' policy."
        )


def leave_alone(optimizer: keras.optimizers.Optimizer | None) -> None:
    """Lets an optimizer be Keras's own: its model is not in 16 bit."""
    if optimizer is not None:
        object.__setattr__(optimizer, _SKIPPING, None)


def held_beside(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Lists the optimizers inside a model's scaler that it holds beside it.

    A step of the user's own may use the one that was given to `compile`, past
    what `compile` has put around it.
    """
    held = {id(value) for value in vars(model).values()}
    return [
        inner
        for scaler in scaling.scalers(model)
        for inner in optimizers.chain(scaler.inner_optimizer)
        if id(inner) in held
    ]


def skippers(model: keras.Model) -> list[scaling.LossScaleOptimizer]:
    """Lists what counts the skips of the optimizers that a model holds.

    Under JAX nothing counts those of a bare one.
    """
    held = [x for x in vars(model).values() if hasattr(x, "__dict__")]
    bare = [vars(x).get(_SKIPPING) for x in held]
    return [
        *scaling.scalers(model),
        *(apply.__self__ for apply in bare if apply is not None),
    ]


def _on_tensorflow(
    optimizer: Any, original: Callable, grads: Sequence, variables: Any
) -> Any:
    if _SKIPPING not in vars(optimizer):
        known = optimizers.remembered(optimizer) if optimizer.built else None
        build = functools.partial(_build, optimizer, list(known or variables))
        replicas.once_for_all(build)
    with _context_values.set_to(_stepping, True):
        vars(optimizer)[_SKIPPING](grads, variables)
    return optimizer.iterations


def _build(optimizer: Any, variables: Sequence) -> None:
    with compilation.outside_of_tracing(variables):
        skipper = scaling.LossScaleOptimizer(
            optimizer, loss_scale=rules.NoLossScale()
        )
        skipper.build(variables)
    optimizers.mark_wrapped(optimizer, False)
    object.__setattr__(optimizer, _SKIPPING, skipper.apply)


def _on_jax(
    optimizer: Any, original: Callable, grads: Sequence, variables: Any
) -> Any:
    if not optimizer.built and variables is not None:
        optimizer.build(variables)
    used = optimizer.variables + optimizers.remembered(optimizer)
    before = [variable.value for variable in used]
    bad = finite.not_finite(list(grads))
    is_finite = ops.logical_not(ops.any(bad))
    if not power.is_placed():
        watch = _watch(optimizer, variables)
        applied = optimizer.iterations.value
        is_bad = ops.logical_not(is_finite)
        standstill.call_if(is_bad, watch.skipped, applied, bad)
    original(optimizer, grads, variables)
    for variable, old in zip(used, before, strict=True):
        if variable.value is not old:
            variable.assign(ops.where(is_finite, variable.value, old))
    return optimizer.iterations


def _watch(optimizer: Any, variables: Any) -> standstill.Watch:
    """Returns what counts the skipped steps of an optimizer in a row (JAX)."""
    watch: standstill.Watch | None = vars(optimizer).get(_WATCH)
    if watch is None:
        used = optimizers.remembered(optimizer)
        paths = optimizers.paths(used if variables is None else variables)
        watch = standstill.Watch(optimizer.name, paths)
        object.__setattr__(optimizer, _WATCH, watch)
    return watch
