"""Compiles steps of optimizers and models for other accelerators."""

from collections.abc import Iterable
from typing import Any

import keras

import tfmix
from benchmarks import compiled_tensorflow, gpu_models, overhead
from tfmix.tools.hardware import (
    compiled_step,
    compiled_text,
    compilers,
    compiling,
)
from tfmix.tools.hardware import target as targets

FEW_LARGE = [(2048, 2048)] * 6
MANY_SMALL = [(256, 256)] * 200
# The transformer of the tables has 4 blocks and is 512 wide.
TRANSFORMER = {
    "length": 128,
    "width": 512,
    "heads": 8,
    "blocks": 4,
    "vocabulary": 256,
}
ROWS = 32  # the transformer's batch size


def compiled(
    optimizer: Any,
    shapes: list[tuple[int, ...]],
    target: str = "h200",
    dtype: str = "float32",
) -> compilers.Compiled:
    """Compiles one step of an optimizer on variables of some shapes.

    The step gets bfloat16 gradients, and casts them to the variables' dtype,
    like the backward pass of a mixed-precision model. It is compiled by the
    backend of this process: TensorFlow's `jit_compile=True` or `jax.jit`.
    """
    initial = keras.initializers.Zeros()
    variables = [
        keras.Variable(initial, shape=shape, dtype=dtype, name=f"v{index}")
        for index, shape in enumerate(shapes)
    ]
    optimizer.build(variables)
    device = compilers.device(targets.find(target))
    if keras.backend.backend() == "jax":
        return _by_jax(optimizer, variables, device)
    return _by_tensorflow(optimizer, variables, device)


def _by_jax(optimizer: Any, variables: list, device: Any) -> Any:
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)

    def described(values: list, dtype: str | None = None) -> list:
        return [
            jax.ShapeDtypeStruct(
                one.shape, dtype or one.dtype, sharding=sharding
            )
            for one in values
        ]

    def step(trained: list, held: list, narrow: list) -> Any:
        with keras.StatelessScope(zip(optimizer.variables, held, strict=True)):
            say_scaled(optimizer)
        gradients = _cast(narrow, variables)
        return optimizer.stateless_apply(held, gradients, trained)

    # Inputs must be in the order of the outputs: JAX overwrites donated inputs
    # in that order, and copies those that do not fit.
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        described(variables),
        described(optimizer.variables),
        described(variables, "bfloat16"),
    )
    return compilers.compile_jax(lowered)


def transformer(
    policy: str, way: str, target: str
) -> compiled_step.CompiledStep:
    """Compiles a transformer's whole training step under one scaler."""
    with tfmix.policy_scope(policy):
        model = gpu_models.transformer(**TRANSFORMER)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = overhead.SYSTEMS[way](keras.optimizers.Adam())
        model.compile(optimizer, loss=loss)
        # `compile` wraps the optimizer under the policy.
        model.optimizer = optimizer
    found = targets.find(target)
    device = compilers.device(found)
    made = compiled_tensorflow.training_step(model, ROWS, device)
    return compiling.record(made, model, found, ROWS, policy)


def _by_tensorflow(optimizer: Any, variables: list, device: Any) -> Any:
    import tensorflow as tf

    @tf.function(jit_compile=True, autograph=False)
    def step(*narrow: Any) -> None:
        say_scaled(optimizer)
        optimizer.apply(_cast(narrow, variables), variables)

    given = [tf.TensorSpec(one.shape, tf.bfloat16) for one in variables]
    return compiled_tensorflow.compiled(step, given, device)


def _cast(narrow: Iterable[Any], variables: list) -> list:
    return [
        keras.ops.cast(gradient, variable.dtype)
        for gradient, variable in zip(narrow, variables, strict=True)
    ]


def say_scaled(optimizer: Any) -> None:
    """Marks the gradients as those of a scaled loss."""
    optimizer.scale_loss(keras.ops.ones(()))


def row(made: compilers.Compiled) -> dict[str, Any]:
    """Returns the row of a program in a table."""
    return _row(compiled_text.read(made.text), made.extra)


def whole_row(step: compiled_step.CompiledStep) -> dict[str, Any]:
    """Returns the row of a whole training step in a table."""
    return {
        **_row(step, step.memory.temporaries),
        "peak, MB": step.memory.peak / 1e6,
        "in 16 bit": f"{step.share_16bit:.0%}",
        "at least, ms": f"{1e3 * step.seconds:.3f} ({step.bound})",
    }


def _row(program: Any, temporaries: int) -> dict[str, Any]:
    return {
        "kernels": program.kernels,
        "copies": program.copies,
        "conditionals": program.conditionals,
        "temporaries, MB": temporaries / 1e6,
        "GB moved": program.bytes / 1e9,
    }
