"""Functions of tensors as programs; under JAX equal ones compiled once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

# A program runs once: it is to compile fast, and to round every 16-bit value
# as one op after the other does.
_OPTIONS: dict[str, bool | int] = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    # These compile for 3 to 8 times as long as what they replace.
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Runner:
    """Runs functions of tensors: compiled, or op by op as they are."""

    compiles: bool
    # By their text. Each keeps alive what the text names by its address.
    _known: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)

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

        # An input that is left out would not show in the text.
        lowered = jax.jit(replay, keep_unused=True).lower(inputs)
        text = lowered.as_text()
        if text not in self._known:
            self._known[text] = lowered.compile(_OPTIONS), lowered
        found = self._known[text][0](inputs)
        return jax.tree.unflatten(jax.tree.structure(form), found)


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
