"""Runs functions of tensors, compiled where single ops take longer."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

# A function runs once, so it must compile fast. It must round every 16-bit
# value, like separate ops. No option prevents a CPU with AVX512-FP16 from
# multiplying and adding in one instruction, which rounds once.
_OPTIONS: dict[str, bool | int] = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    # These functions are too small to compile in parallel.
    "xla_cpu_parallel_codegen_split_count": 1,
    # These make compilation take 3 to 8 times as long.
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of nests of tensors, compiled if JAX is on a CPU.

    There, single ops would take longer. On a GPU or TPU, compiled functions
    were not compared with single ops.
    """
    if keras.backend.backend() != "jax":
        return function(*arguments)
    import jax

    if jax.default_backend() != "cpu":
        return function(*arguments)
    # The scope keeps values of new variables out of the trace. NumPy casts
    # constants, and must not warn: the check finds overflows by itself.
    with keras.StatelessScope(), np.errstate(over="ignore"):
        lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(_OPTIONS)(*arguments)
