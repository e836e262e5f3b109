"""What a 16-bit optimizer's step needs while TensorFlow traces a function."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras


def outside(variables: Sequence) -> contextlib.AbstractContextManager:
    """Creates variables outside of the function being traced.

    Masters start from the model's variables. TensorFlow cannot move such a
    first value out of a function by itself, and XLA refuses what stays in.

    Args:
        variables: The model's variables, whose values are read.

    Returns:
        A context manager; one that does nothing where nothing is traced, on
        replicas, and where the model itself is created in the function.
    """
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    import tensorflow as tf

    if not tf.inside_function() or tf.distribute.has_strategy():
        return contextlib.nullcontext()
    with tf.init_scope():
        ready = tf.executing_eagerly() and all(
            bool(variable.value.is_initialized()) for variable in variables
        )
    return tf.init_scope() if ready else contextlib.nullcontext()


def here(grads: Sequence) -> list:
    """Brings gradients into the graph being traced.

    Inside the loss-scale optimizer's conditional some gradients are computed
    in its graph and some outside, which TensorFlow's all-reduce refuses.

    Args:
        grads: List of tensors, sparse gradients and `None`s.

    Returns:
        The list with the same values.
    """
    if keras.backend.backend() != "tensorflow":
        return list(grads)
    import tensorflow as tf

    def copied(grad: Any) -> Any:
        if grad is None:
            return None
        if isinstance(grad, tf.IndexedSlices):
            values, indices = map(tf.identity, (grad.values, grad.indices))
            return tf.IndexedSlices(values, indices, grad.dense_shape)
        return tf.identity(grad)

    return [copied(grad) for grad in grads]
