"""Turns gradients of a loss, scaled or not, into unscaled float32 ones.

A model under a tfmix policy scales its gradients inside. An optimizer that has
only variables of such models leaves losses and gradients alone. Any other
multiplies losses by its loss scale, and divides the gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from tfmix import _users_code
from tfmix._keras import compilation
from tfmix._keras import variables as keras_variables
from tfmix.loss_scaling import rules
from tfmix.ops import tensors
from tfmix.step import all_finite, step_outcome

# Beyond 2^126 a scale's reciprocal is subnormal, which XLA flushes to zero.
_HALFWAY = 2.0**64
_NOT_SCALED = (
    "The gradients are divided by the loss scale, but the loss was not "
    "multiplied by it, so every update is too small by that factor. Take the "
    "gradients of the scaled loss: `scaled = optimizer.scale_loss(loss)` "
    "inside the tape, then `tape.gradient(scaled, ...)`; or, if the gradients "
    "are those of the loss, write optimizer.apply(grads, variables, "
    "unscaled=True)."
)


class Losses:
    """Whether an optimizer multiplies losses by its loss scale.

    Args:
        are_scaled: Boolean. False if the models scale their gradients.
    """

    def __init__(self, are_scaled: bool) -> None:
        self.are_scaled = are_scaled
        # Also true after the warning that no loss was scaled.
        self._has_scaled = False

    def note(self, optimizer: Any) -> None:
        """Notes that an optimizer has scaled a loss."""
        self._has_scaled = True
        if (step := step_outcome.around()) is not None:
            step.scaled.add(id(optimizer))

    def are_gradients_scaled(self, optimizer: Any, warns: bool = False) -> bool:
        """Returns whether the gradients are those of a scaled loss.

        In a model's train step, they are if the step has scaled its loss, which
        it may have done before the optimizer knew its variables.

        Args:
            optimizer: The optimizer.
            warns: Whether to warn if no loss was ever scaled.
        """
        if (step := step_outcome.around()) is not None:
            return id(optimizer) in step.scaled
        if self.are_scaled and warns and not self._has_scaled:
            self._has_scaled = True
            rule = optimizer.rule
            if not (rules.is_constant(rule) and rule.lowest_scale == 1.0):
                _users_code.warn(_NOT_SCALED)
        return self.are_scaled


def in_float32(grads: Sequence, variables: Sequence) -> list:
    """Returns gradients, dense or sparse, in float32.

    A value that overwrites its variable stays unchanged.
    """
    return _of_gradients(widened, grads, variables)


def unscaled(grads: Sequence, variables: Sequence, scale: Any) -> list:
    """Returns gradients in float32, divided by the scale.

    A value that overwrites its variable stays unchanged.
    """
    divided = _quotient(scale)

    def true(gradient: Any) -> Any:
        wide = widened(gradient)
        if not all_finite.is_sparse(gradient):
            return _on_values(divided, wide)
        # XLA may have to evaluate the scale at compile time
        # (`divides_gradients`), which a barrier would prevent.
        return _on_values(functools.partial(_divided, scale), wide)

    return _of_gradients(true, grads, variables)


def _of_gradients(
    function: Callable[[Any], Any], grads: Sequence, variables: Sequence
) -> list:
    return [
        gradient
        if gradient is None or keras_variables.is_overwritten(variable)
        else function(gradient)
        for gradient, variable in zip(grads, variables, strict=True)
    ]


def narrow_if_dense(grads: Sequence, true: Sequence) -> list:
    """Returns what to check: dense gradients as given, sparse ones in float32.

    Fewer bytes are read so. The rows of sparse gradients are summed, in
    float32.
    """
    return [
        wide if all_finite.is_sparse(gradient) else gradient
        for gradient, wide in zip(grads, true, strict=True)
    ]


def _quotient(scale: Any) -> Callable[[Any], Any]:
    """Returns a function that divides a tensor by a scale."""
    # The reciprocal of a constant beyond 2^126 would be folded to zero.
    apart = compilation.kept_apart(scale)
    if compilation.by_xla():
        return _by_reciprocal(apart)
    return functools.partial(_divided, apart)


def _divided(scale: Any, tensor: Any) -> Any:
    return ops.divide(tensor, ops.cast(scale, tensor.dtype))


def _by_reciprocal(scale: Any) -> Callable[[Any], Any]:
    # XLA repeats a product in every kernel that reads it, where a division gets
    # a kernel and a tensor of its own. It is exact for powers of two; otherwise
    # the product rounds once more.
    is_huge = ops.greater(scale, _HALFWAY)
    lowered = ops.where(is_huge, scale / _HALFWAY, scale)

    # All gradients share the scalars, because each operation takes time to
    # compile.
    @functools.cache
    def reciprocal(dtype: Any) -> Any:
        return 1.0 / ops.cast(lowered, dtype)

    def multiplied(tensor: Any) -> Any:
        # XLA would join two factors into one.
        tensor = ops.where(is_huge, tensor / _HALFWAY, tensor)
        return tensor * reciprocal(tensor.dtype)

    return multiplied


def without_infinities(tensor: Any) -> Any:
    """Returns a float tensor, dense or sparse, with NaN for infinity."""
    return _on_values(
        lambda values: ops.where(ops.isfinite(values), values, float("nan")),
        tensor,
    )


def _on_values(function: Callable[[Any], Any], tensor: Any) -> Any:
    if all_finite.is_sparse_of_jax(tensor):
        parts = function(tensor.data), tensor.indices
        return type(tensor)(parts, shape=tensor.shape)
    if not all_finite.is_sparse(tensor):
        return function(tensor)
    values = function(tensor.values)
    return type(tensor)(values, tensor.indices, tensor.dense_shape)


def widened(gradient: Any) -> Any:
    """Returns a gradient, dense or sparse, in float32 if it was 16-bit."""
    narrow = keras_variables.is_narrow(gradient)
    return _on_values(tensors.to_float32, gradient) if narrow else gradient


def norm(true: Sequence, variables: Sequence) -> Any:
    """Returns the float32 norm of all unscaled gradients together."""
    squares = [
        ops.sum(ops.square(ops.cast(all_finite.summed(gradient), "float32")))
        for gradient in without_values(true, variables)
        if gradient is not None
    ]
    return ops.sqrt(sum(squares, ops.zeros(())))


def without_values(grads: Sequence, variables: Sequence) -> list:
    """Returns gradients without the values that overwrite their variables."""
    return [
        gradient
        for gradient, variable in zip(grads, variables, strict=True)
        if not keras_variables.is_overwritten(variable)
    ]
