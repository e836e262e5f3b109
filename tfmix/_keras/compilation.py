"""Is the step that is being traced compiled by XLA?

Two things turn round under XLA: an elementwise operation is free where it
fuses with its consumer, and each kernel costs milliseconds to compile.

Reads the graph's control-flow context, which `tf.function(jit_compile=True)`
sets while it traces. Checked on TensorFlow 2.20 and 2.21. Where a later one
tells nothing, the answer is no: the step is right then, only slower.
"""

from typing import Any

import keras


def by_xla() -> bool:
    """Returns whether what is traced now becomes part of an XLA program."""
    if keras.backend.backend() != "tensorflow":
        return True
    import tensorflow as tf

    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = getattr(graph, "_get_control_flow_context", _none)()
        while context is not None:
            if getattr(context, "IsXLAContext", _none)():
                return True
            context = getattr(context, "outer_context", None)
        graph = getattr(graph, "outer_graph", None)
    return False


def for_cpu() -> bool:
    """Returns whether JAX compiles for a CPU by default."""
    import jax

    return jax.default_backend() == "cpu"


def kept_apart(tensor: Any) -> Any:
    """Returns the tensor; XLA does not look through this.

    A branch that calls this stays a branch: XLA turns a conditional whose
    branches are cheap into selects. Those need the variables' old values next
    to the new ones, and copy every slot.

    Args:
        tensor: A tensor on a step that XLA compiles.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.optimization_barrier(tensor)
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    return gen_xla_ops.xla_optimization_barrier([tensor])[0]


def _none() -> None:
    """Stands in for what a graph does not have."""
