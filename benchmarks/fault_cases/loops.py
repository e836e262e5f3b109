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
    _assign([*variables, *optimizer.variables], [*trained, *state])


@functools.lru_cache(maxsize=8)
def _compiled(optimizer: Any, **how: bool) -> Any:
    """Returns a compiled step; Keras's class would compile in each one."""
    import jax

    return jax.jit(functools.partial(optimizer.stateless_apply, **how))


def repeat(optimizer: Any, variable: Any, gradient: Any, steps: int) -> None:
    """Runs many steps with the same gradient in one compiled loop."""
    if keras.backend.backend() == "tensorflow":
        _repeat_tensorflow(optimizer, variable, gradient, steps)
    else:
        _repeat_jax(optimizer, variable, gradient, steps)


def _repeat_tensorflow(
    optimizer: Any, variable: Any, gradient: Any, steps: int
) -> None:
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def loop() -> None:
        for _ in tf.range(steps):
            scaled = optimizer.scale_loss(tf.constant(gradient))
            optimizer.apply([scaled], [variable])

    loop()


def _repeat_jax(
    optimizer: Any, variable: Any, gradient: Any, steps: int
) -> None:
    import jax

    def body(_: Any, carry: Any) -> Any:
        trainable, state = carry
        mapping = zip(optimizer.variables, state, strict=True)
        with keras.StatelessScope(state_mapping=mapping):
            scaled = optimizer.scale_loss(jax.numpy.asarray(gradient))
        return optimizer.stateless_apply(state, [scaled], trainable)

    start = [variable.value], [v.value for v in optimizer.variables]
    loop = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, body, carry))
    trainable, state = loop(start)
    _assign([variable, *optimizer.variables], [*trainable, *state])


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
