"""Compiles functions of tensors; on JAX, equal functions only once."""

import dataclasses
from collections.abc import Callable, Iterator
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


@dataclasses.dataclass(frozen=True, eq=False)
class Runner:
    """Runs functions of tensors, compiled or op by op."""

    compiles: bool
    # The key describes the computation. It contains the ids of constants, so
    # each entry keeps the traced function, and with it the constants, alive.
    _cache: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that takes and returns nests of tensors."""
        if not self.compiles:
            return function(*arguments)
        import jax

        # The scope keeps values of new variables out of the trace. NumPy casts
        # constants, and must not warn: the check finds overflows by itself.
        with keras.StatelessScope(), np.errstate(over="ignore"):
            trace = jax.make_jaxpr(function, return_shape=True)
            traced, form = trace(*arguments)
        inputs = [*traced.consts, *jax.tree.leaves(arguments)]

        def replay(inputs: list[Any]) -> list[Any]:
            count = len(traced.consts)
            return jax.core.eval_jaxpr(
                traced.jaxpr, inputs[:count], *inputs[count:]
            )

        types = tuple(map(jax.typeof, inputs))
        key = str(traced.jaxpr), types, tuple(_constants(traced.jaxpr))
        if key not in self._cache:
            # Functions with the same key must accept the same inputs.
            lowered = jax.jit(replay, keep_unused=True).lower(inputs)
            self._cache[key] = lowered.compile(_OPTIONS), traced
        outputs = self._cache[key][0](inputs)
        return jax.tree.unflatten(jax.tree.structure(form), outputs)


def _constants(jaxpr: Any) -> Iterator[int]:
    """Yields the ids of arrays in a jaxpr, which its text leaves out."""
    import jax

    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves([*equation.params.values()]):
            if isinstance(inner, jax.extend.core.ClosedJaxpr):
                yield from map(id, inner.consts)
                yield from _constants(inner.jaxpr)
            elif isinstance(inner, jax.extend.core.Jaxpr):
                yield from _constants(inner)


def runner() -> Runner:
    """Returns a runner, which compiles if JAX computes on a CPU.

    On a GPU or TPU, compiled functions were not compared with single ops.
    """
    if keras.backend.backend() != "jax":
        return Runner(compiles=False)
    import jax

    return Runner(compiles=jax.default_backend() == "cpu")


def compiled(function: Callable[..., Any], xla: bool | None = None) -> Any:
    """Compiles a function of tensors; JAX always uses XLA."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(
        function, jit_compile=xla, autograph=False, reduce_retracing=True
    )
