"""Runs XLA's compilers by the private names of JAX and jaxlib.

There are no public ones. They were checked on jax 0.10.2 with libtpu 0.0.52 and
the CUDA 12 plugin.
"""

from collections.abc import Mapping
from typing import Any


def are_started() -> bool:
    """Returns whether JAX has started its backends."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def is_registered(platform: str) -> bool:
    """Returns whether JAX knows a platform's compiler."""
    from jax._src import xla_bridge

    return platform in xla_bridge._topology_factories


def mlir_of(serialized: bytes) -> str:
    """Returns the MLIR text of a serialized HLO program."""
    from jaxlib import _hlo, xla_client

    computation = _hlo.XlaComputation(serialized)
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(computation)
    return str(text)


def compile_mlir(text: str, device: Any, flags: Mapping[str, Any]) -> Any:
    """Compiles the MLIR text of a program for one device."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jaxlib import _jax
    from jaxlib.mlir import ir

    settings = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, env_options_overrides=dict(flags)
    )
    module = ir.Module.parse(text, mlir.make_ir_context())
    devices = _jax.DeviceList((device,))
    return device.client.compile(module, devices, settings)
