"""Compiles steps of TensorFlow for accelerators that are not attached.

It needs private names of jaxlib; they were checked on jax 0.10.2 with libtpu
0.0.52 and the CUDA 12 plugin.
"""

import re
from typing import Any

import keras
from keras import tree

from tfmix.tools.hardware import compilers, lowering


def training_step(
    model: keras.Model, batch_size: int, device: Any
) -> compilers.Compiled:
    """Compiles the step that `fit` runs for each batch, on either backend."""
    how = (
        {}
        if keras.backend.backend() == "jax"
        else {"compile_step": _compile_step}
    )
    return lowering.compile_training_step(model, batch_size, device, **how)


def _compile_step(
    model: keras.Model, data: Any, device: Any
) -> compilers.Compiled:
    import tensorflow as tf

    # TensorFlow compiles for specs of tensors, but not for nests of specs.
    leaves = [
        tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in tree.flatten(data)
    ]

    @tf.function(jit_compile=True, autograph=False)
    def step(*batch: Any) -> Any:
        return model.train_step(tree.pack_sequence_as(data, list(batch)))

    return compiled(step, leaves, device)


def compiled(function: Any, arguments: Any, device: Any) -> compilers.Compiled:
    """Compiles a `tf.function(jit_compile=True)` for one device."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jaxlib import _hlo, _jax, xla_client
    from jaxlib.mlir import ir

    with compilers.traced_for(device):
        lowered = function.experimental_get_compiler_ir(*arguments)
        serialized = lowered(stage="hlo_serialized")
    computation = _hlo.XlaComputation(serialized)
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    module = ir.Module.parse(in_stablehlo(text), mlir.make_ir_context())

    def compile_with(flags: dict[str, Any]) -> Any:
        settings = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, env_options_overrides=flags
        )
        devices = _jax.DeviceList((device,))
        return device.client.compile(module, devices, settings)

    executable = compilers.compile_with_fallback(compile_with)
    (optimized,) = executable.hlo_modules()
    memory = executable.get_compiled_memory_stats()
    on_tpu = device.platform == "tpu"
    costs = executable.cost_analysis() if on_tpu else None
    return compilers.record(optimized.to_string(), memory, costs)


def in_stablehlo(text: str) -> str:
    """Corrects what XLA's translation of a program leaves outside StableHLO.

    A copy becomes an identity, because StableHLO has no copies. A product that
    names an algorithm becomes a general one, because others cannot name one.
    """
    text = re.sub(
        r"mhlo\.copy(.*?) : (tensor<[^>]*>)",
        r"stablehlo.reshape\1 : (\2) -> \2",
        text,
    )
    return re.sub(
        r"stablehlo\.dot (\S+ \S+), (precision = \[.*?\]) "
        r"\{(algorithm) = #stablehlo.dot_algorithm(<.*?>)\}",
        r"stablehlo.dot_general \1, contracting_dims = [1] x [0], \2, \3 = \4",
        text,
    )
