"""Runs XLA's compilers for accelerators that are not attached.

The compilers come from the accelerators' wheels.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from tfmix._keras import context, xla_compilers
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
        arguments: Bytes of the arguments.
        outputs: Bytes of the outputs.
        aliased: Bytes of the outputs that overwrite arguments.
        temporaries: Further bytes that the device needs while it runs.
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


def device(target: targets.Target) -> Any:
    """Returns JAX's record of a device to compile for.

    Raises:
        ImportError: If the target's compiler is not installed.
    """
    if lacking := missing(target):
        extra, size, _ = _NEEDED[target.kind]
        raise ImportError(
            f"The compiler for target={target.name!r} is not installed: there "
            f"is no {', '.join(lacking)}. Run `pip install '.[{extra}]'` in "
            f"tfmix's folder{size}; no {target.kind} is needed."
        )
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    import jax
    from jax.experimental import topologies

    jax.local_devices(backend="cpu")

    if target.kind == "GPU":
        _register_cuda()
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.name,
            topology="1x1x1",
            target_config=targets.config(target),
        )
    else:
        # JAX takes the two cores of a v4 chip for one device.
        cores = {"chip_config_name": "megacore"} if target.name == "v4" else {}
        # These form boxes, and the others squares.
        grid = "1x1x1" if target.name in ("v4", "v5p") else "1x1"
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target.name}:{grid}", **cores
        )
    return description.devices[0]


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
    return context.compiled_for(platform)


def compile_jax(lowered: Any) -> Compiled:
    """Compiles the result of `jax.jit(...).lower(...)`."""
    compiled = compile_with_fallback(
        lambda flags: lowered.compile(compiler_options=flags)
    )
    return record(
        compiled.as_text(), compiled.memory_analysis(), compiled.cost_analysis()
    )


def compile_with_fallback(
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


def record(text: str, memory: Any, costs: dict | None) -> Compiled:
    """Returns a `Compiled` of what JAX knows of a program."""
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
