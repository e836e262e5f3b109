"""What a 16-bit optimizer's step needs while TensorFlow traces a function."""

import contextlib
from collections.abc import Sequence

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
