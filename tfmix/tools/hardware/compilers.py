"""Runs XLA's compilers for accelerators that are not attached.

The compilers come from the accelerators' wheels.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any

import keras

from tfmix._keras import tracing, xla_compilers
from tfmix.tools.hardware import target as targets

_CUDA = "jax_plugins.xla_cuda12"
# The extras of setup.cfg, what they download, and the modules in them.
_NEEDED = {
    "TPU": ("tpu", "", ("jax", "libtpu")),
    "GPU": (
        "nvidia",
        " (3 GB)",
        (
            "jax",
            _CUDA,
            "nvidia.cuda_nvcc",
            "nvidia.cudnn",
            "nvidia.cublas",
            "nvidia.cuda_runtime",
        ),
    ),
}
# By default Triton computes products. With a GPU attached, XLA would also time
# the library's kernels.
_NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
# libtpu reads these. Without them, and without a TPU, it asks the cloud for
# minutes which machine it runs on, allows only one process to load it, and
# complains that there is no TPU.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program from the accelerator's compiler.

    Attributes:
        text: The optimized program, as HLO text.
        arguments: Bytes of the arguments on each device.
        outputs: Bytes of the outputs on each device.
        aliased: Bytes of the outputs that overwrite arguments.
        temporaries: Further bytes that each device needs while it runs.
        accessed: The "bytes accessed" that a TPU's compiler counts itself,
            including data that stays on the chip. 0 for a GPU.
    """

    text: str
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    accessed: float

    @property
    def extra(self) -> int:
        """Bytes of temporaries, and of outputs that overwrite no argument."""
        return self.temporaries + self.outputs - self.aliased


def missing(target: targets.Target) -> list[str]:
    """Returns the missing modules of the target's compiler."""
    return [
        module
        for module in _NEEDED[target.kind][2]
        if not _is_installed(module)
    ]


def devices(target: targets.Target, count: int) -> list[Any]:
    """Returns JAX's records of devices to compile for.

    Raises:
        ImportError: If the target's compiler is not installed.
        ValueError: If the devices cannot be linked.
    """
    grid = targets.topology(target, count)
    if lacking := missing(target):
        extra, size, _ = _NEEDED[target.kind]
        raise ImportError(
            f"The compiler for target={target.name!r} is not installed: there "
            f"is no {', '.join(lacking)}. Run `pip install '.[{extra}]'` in "
            f"tfmix's folder{size}; no {target.kind} is needed."
        )
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    _start_jax()
    from jax.experimental import topologies

    if target.kind == "GPU":
        _register_cuda()
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.name,
            topology=grid,
            target_config=targets.config(target),
        )
    else:
        # JAX takes the two cores of a v4 chip for one device.
        cores = {"chip_config_name": "megacore"} if target.name == "v4" else {}
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target.name}:{grid}", **cores
        )
    return list(description.devices)[:count]


def _start_jax() -> None:
    """Starts JAX; without a GPU or TPU if TensorFlow uses it."""
    import jax

    chosen = jax.config.jax_platforms or xla_compilers.are_started()
    if keras.backend.backend() != "jax" and not chosen:
        jax.config.update("jax_platforms", "cpu")
    jax.local_devices(backend="cpu")


def _register_cuda() -> None:
    """Registers NVIDIA's compiler if JAX did not.

    Without `JAX_PLATFORMS=cpu`, JAX does not register it on a machine that
    lacks any of the libraries for running programs.
    """
    if not xla_compilers.is_registered("cuda"):
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        importlib.import_module(_CUDA).initialize()


def traced_for(device: Any) -> contextlib.AbstractContextManager[None]:
    """Sets the platform of a block in which a step is traced."""
    platform = "cuda" if device.platform == "gpu" else device.platform
    return tracing.compiled_for(platform)


def compile_jax(lowered: Any) -> Compiled:
    """Compiles the result of `jax.jit(...).lower(...)`."""
    compiled = _compile_with_fallback(
        lambda flags: lowered.compile(compiler_options=flags)
    )
    return _record(
        compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis()
    )


def compile_tensorflow(function: Any, arguments: Any, device: Any) -> Compiled:
    """Compiles a `tf.function(jit_compile=True)` for one device."""
    with traced_for(device):
        lowered = function.experimental_get_compiler_ir(*arguments)
        serialized = lowered(stage="hlo_serialized")
    text = in_stablehlo(xla_compilers.mlir_of(serialized))

    def compile_with(flags: dict[str, Any]) -> Any:
        return xla_compilers.compile_mlir(text, device, flags)

    executable = _compile_with_fallback(compile_with)
    (optimized,) = executable.hlo_modules()
    memory = executable.get_compiled_memory_stats()
    on_tpu = device.platform == "tpu"
    costs = executable.cost_analysis() if on_tpu else None
    return _record(optimized.to_string(), memory, costs)


def _compile_with_fallback(
    compile_with: Callable[[dict[str, Any]], Any],
) -> Any:
    """Compiles, without Triton if it has no kernel for a product."""
    # With a GPU attached, XLA would time other kernels instead of failing.
    try:
        return compile_with({})
    except RuntimeError as error:
        if "Couldn't find output tile sizes" not in str(error):
            raise
    return compile_with(_NO_TRITON)


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


def _record(text: str, memory: Any, costs: dict | None) -> Compiled:
    return Compiled(
        text,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        (costs or {}).get("bytes accessed", 0.0),
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
