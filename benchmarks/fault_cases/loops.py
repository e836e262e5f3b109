"""Training loops in miniature: one variable, gradients made to order."""

from typing import Any

import keras
import numpy as np


def wrapped_vector(
    system: Any, optimizer: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """Returns the weight [1, 2] and a built optimizer, SGD(0.1) by default."""
    variable = keras.Variable(np.float32([1.0, 2.0]), name="weight")
    optimizer = system.wrap(optimizer or keras.optimizers.SGD(0.1), **settings)
    optimizer.build([variable])
    return variable, optimizer


def step(optimizer: Any, variables: Any, gradients: Any) -> Any:
    """Takes a step with true gradients, scaled as a tape would have."""
    scale = optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))
    scaled = [keras.ops.convert_to_tensor(g) * scale for g in gradients]
    return optimizer.apply(scaled, variables)


def repeat(optimizer: Any, variable: Any, gradient: Any, steps: int) -> None:
    """Takes many steps with one gradient in one compiled loop."""
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
            optimizer.apply([tf.constant(gradient)], [variable])

    loop()


def _repeat_jax(
    optimizer: Any, variable: Any, gradient: Any, steps: int
) -> None:
    import jax

    def body(_: Any, carry: Any) -> Any:
        trainable, state = carry
        return optimizer.stateless_apply(
            state, [jax.numpy.asarray(gradient)], trainable
        )

    start = [variable.value], [v.value for v in optimizer.variables]
    loop = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, body, carry))
    trainable, state = loop(start)
    variable.assign(trainable[0])
    for own, value in zip(optimizer.variables, state, strict=True):
        own.assign(value)
