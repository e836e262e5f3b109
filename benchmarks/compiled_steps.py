"""Optimizer steps, compiled for an accelerator that is not here."""

from collections.abc import Callable
from typing import Any

import keras

import tfmix
from tfmix.hardware import compilers, programs, targets

FEW_LARGE = [(2048, 2048)] * 6
MANY_SMALL = [(256, 256)] * 200
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda optimizer: optimizer,
    "Keras": keras.optimizers.LossScaleOptimizer,
    "tfmix": tfmix.LossScaleOptimizer,
}


def compiled(
    optimizer: Any,
    shapes: list[tuple[int, ...]],
    target: str = "h200",
    dtype: str = "float32",
) -> compilers.Compiled:
    """Compiles one step of an optimizer on variables of some shapes.

    Goes through the backend of this process: TensorFlow's `jit_compile=True`
    or `jax.jit`.
    """
    initial = keras.initializers.Zeros()
    variables = [
        keras.Variable(initial, shape=shape, dtype=dtype, name=f"v{index}")
        for index, shape in enumerate(shapes)
    ]
    optimizer.build(variables)
    (device,) = compilers.devices(targets.find(target), 1)
    if keras.backend.backend() == "jax":
        return _by_jax(optimizer, variables, device)
    return _by_tensorflow(optimizer, variables, device)


def _by_jax(optimizer: Any, variables: list, device: Any) -> Any:
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)

    def described(values: list) -> list:
        return [
            jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)
            for one in values
        ]

    def step(trained: list, held: list, gradients: list) -> Any:
        with keras.StatelessScope(zip(optimizer.variables, held, strict=True)):
            _say_scaled(optimizer)
        return optimizer.stateless_apply(held, gradients, trained)

    # What goes in lies in the order of what comes out: JAX writes one over
    # the other in that order, and copies where it does not fit.
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        described(variables),
        described(optimizer.variables),
        described(variables),
    )
    return compilers.compile_jax(lowered)


def _by_tensorflow(optimizer: Any, variables: list, device: Any) -> Any:
    import tensorflow as tf

    @tf.function(jit_compile=True, autograph=False)
    def step(*gradients: Any) -> None:
        _say_scaled(optimizer)
        optimizer.apply(list(gradients), variables)

    given = [tf.TensorSpec(one.shape, one.dtype) for one in variables]
    return compilers.compile_tensorflow(step, given, device)


def _say_scaled(optimizer: Any) -> None:
    """Tells tfmix that the gradients are those of a scaled loss."""
    optimizer.scale_loss(keras.ops.ones(()))


def row(made: compilers.Compiled) -> dict[str, Any]:
    """Returns what a table shows of a program."""
    program = programs.read(made.text)
    return {
        "kernels": program.kernels,
        "copies": program.copies,
        "conditionals": program.conditionals,
        "temporaries, MB": made.extra / 1e6,
        "GB moved": made.cost.get("bytes accessed", program.bytes) / 1e9,
    }
