"""One replica's step, for wrappers used outside the loss-scale optimizer."""

import contextlib
from collections.abc import Callable
from typing import Any

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
    from tfmix.scaling.step import distribute

    return distribute.sum_over_replicas(list(grads))


def single(optimizer: Any) -> Any:
    """Shows the code inside this replica's copies and no strategy.

    Args:
        optimizer: The built wrapper.

    Returns:
        A context manager; one that does nothing where there is no strategy.
    """
    if not _in_replica_of_many():
        return contextlib.nullcontext()
    from tfmix.scaling.step import distribute

    variables = optimizer.variables + optimizer._trainable_variables
    return distribute.one_replica(variables, optimizer)


def run_on_each(optimizer: Any, function: Callable[[], None]) -> None:
    """Runs a function of the optimizer's variables on every replica.

    Args:
        optimizer: The built wrapper.
        function: Function without arguments.
    """
    strategy = getattr(optimizer, "_distribution_strategy", None)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        function()
        return
    import tensorflow as tf

    def on_replica() -> None:
        with single(optimizer):
            function()

    tf.function(lambda: strategy.run(on_replica))()


def _in_replica_of_many() -> bool:
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    if not tf.distribute.has_strategy():
        return False
    from tfmix.scaling.step import distribute

    distribute.check_strategy(tf.distribute.get_strategy())
    distribute.check_replica_context()
    return True
