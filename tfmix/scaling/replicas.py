"""One replica's step, for wrappers used outside the loss-scale optimizer."""

import contextlib
from typing import Any, Iterable

import keras


def sum_gradients(grads: Any) -> Any:
    """Sums gradients over the replicas, in the dtype they come in.

    Args:
        grads: List of tensors and `None`s.

    Returns:
        The list of sums; `grads` itself where there is one replica.
    """
    if not _in_replica_of_many():
        return grads
    from tfmix.scaling import distribute

    return distribute.sum_over_replicas(list(grads))


def single(variables: Iterable[Any]) -> Any:
    """Shows the code inside this replica's copies and no strategy.

    Args:
        variables: All `keras.Variable`s that the code reads or writes.

    Returns:
        A context manager; one that does nothing where there is no strategy.
    """
    if not _in_replica_of_many():
        return contextlib.nullcontext()
    from tfmix.scaling import distribute

    return distribute.one_replica(variables)


def _in_replica_of_many() -> bool:
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    if not tf.distribute.has_strategy():
        return False
    from tfmix.scaling import distribute

    distribute.check_strategy(tf.distribute.get_strategy())
    distribute.check_replica_context()
    return True
