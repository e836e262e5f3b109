"""Functions of tensors as programs; under JAX equal ones compiled once."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

# A program runs once: it is to compile fast, and to round every 16-bit value
# as one op after the other does. A CPU with AVX512-FP16 still multiplies and
# adds in one instruction, which rounds once: no option rules that out.
_OPTIONS: dict[str, bool | int] = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    # It is too small for parts that are compiled side by side.
    "xla_cpu_parallel_codegen_split_count": 1,
    # These compile for 3 to 8 times as long as what they replace.
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Runner:
    """Runs functions of tensors: compiled, or op by op as they are."""

    compiles: bool
    # By what they compute. Each keeps alive what is named by its address.
    _known: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what a function of nests of tensors returns, a nest."""
        if not self.compiles:
            return function(*arguments)
        import jax

        # Variables that the code makes get their values outside of the trace.
        # NumPy makes the constants: one that overflows is what is looked for.
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
        if key not in self._known:
            # An input that is left out is an input of an equal one.
            lowered = jax.jit(replay, keep_unused=True).lower(inputs)
            self._known[key] = lowered.compile(_OPTIONS), traced
        outputs = self._known[key][0](inputs)
        return jax.tree.unflatten(jax.tree.structure(form), outputs)


def _constants(jaxpr: Any) -> Iterator[int]:
    """Yields the ids of arrays inside a program, which its text leaves out."""
    import jax

    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves([*equation.params.values()]):
            if isinstance(inner, jax.extend.core.ClosedJaxpr):
                yield from map(id, inner.consts)
                yield from _constants(inner.jaxpr)
            elif isinstance(inner, jax.extend.core.Jaxpr):
                yield from _constants(inner)


def runner() -> Runner:
    """Returns one that compiles where JAX computes on a CPU.

    Programs for a GPU and a TPU were not compared with their single ops.
    """
    if keras.backend.backend() != "jax":
        return Runner(compiles=False)
    import jax

    return Runner(compiles=jax.default_backend() == "cpu")


def compiled(function: Callable[..., Any], xla: bool | None = None) -> Any:
    """Compiles a function of tensors, on JAX always with XLA."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(
        function, jit_compile=xla, autograph=False, reduce_retracing=True
    )
