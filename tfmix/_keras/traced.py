"""What is known of tensors and variables while a function is traced."""

from typing import Any

import keras

# Operations that take a variable's handle and leave the variable alone.
_READS = {
    "ReadVariableOp",
    "ResourceGather",
    "VarIsInitializedOp",
    "VariableShape",
}


def is_symbolic(tensor: Any) -> bool:
    """Says whether a tensor's value is not known yet."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return bool(tf.is_symbolic_tensor(tensor))
    import jax

    return isinstance(tensor, jax.core.Tracer)


def may_be_written(variable: Any) -> bool:
    """Says whether what was traced so far may change a `tf.Variable`.

    True wherever that cannot be known: in eager mode, and where a function
    that was traced apart takes the variable.
    """
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not hasattr(graph, "capture"):
        return True
    users = graph.capture(variable.handle).consumers()
    return any(user.type not in _READS for user in users)
