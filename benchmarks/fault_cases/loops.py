"""Tiny training loops with one variable and given gradients."""

import functools
from typing import Any

import keras


def wrapped_vector(
    system: Any, optimizer: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """Returns the weight [1, 2] and a built optimizer, SGD(0.1) by default."""
    variable = system.variable([1.0, 2.0], "weight")
    optimizer = system.wrap(optimizer or keras.optimizers.SGD(0.1), **settings)
    optimizer.build([variable])
    return variable, optimizer


def step(optimizer: Any, variables: Any, gradients: Any) -> None:
    """Runs a step with the gradients of a scaled loss."""
    scale = optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))
    scaled = [keras.ops.convert_to_tensor(g) * scale for g in gradients]
    apply(optimizer, scaled, variables)


def apply(optimizer: Any, gradients: Any, variables: Any, **how: bool) -> None:
    """Applies gradients like a loop on this backend.

    Args:
        optimizer: The system's optimizer.
        gradients: Scaled gradients, or unscaled ones if `how` says so.
        variables: Their variables.
        **how: Further arguments of the optimizer's method.
    """
    if keras.backend.backend() == "tensorflow":
        optimizer.apply(gradients, variables, **how)
        return
    trained, state = _compiled(optimizer, **how)(
        [v.value for v in optimizer.variables],
        gradients,
        [v.value for v in variables],
    )
    changed = [*variables, *optimizer.variables]
    for variable, value in zip(changed, [*trained, *state], strict=True):
        variable.assign(value)


@functools.lru_cache(maxsize=8)
def _compiled(optimizer: Any, **how: bool) -> Any:
    """Returns a compiled step; Keras's class would compile in each one."""
    import jax

    return jax.jit(functools.partial(optimizer.stateless_apply, **how))
