"""One optimizer step per replica, without a merge call (`tf.distribute`).

Keras's optimizers sum the gradients over the replicas and write mirrored
variables through merge calls, which may not stand inside a `tf.cond`. tfmix
sums the gradients first. From there on every replica holds the same numbers,
so each can take its step alone: it sees only its own copy of each variable
and no strategy. All replicas reach the same decision, and none can wait for
another. That also lets gradient accumulation and EMA, whose conditionals
Keras cannot run under `MirroredStrategy`, work unchanged.

Touches `keras.Variable._value`, `DistributedVariable._get`, and of optimizers
`_distribution_strategy` and `_all_reduce_sum_gradients`. Checked on Keras
3.12.4 and 3.15.1 with TensorFlow 2.21.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfmix._keras import attributes, optimizers

# Strategies whose variables do not live on the replicas that compute the
# gradients: there is no local copy to update, and no joint step to skip.
_REFUSED = {
    "ParameterServerStrategyV2": "its workers update shared variables alone",
    "ParameterServerStrategyV1": "its workers update shared variables alone",
    "CentralStorageStrategy": "its variables are not copied to each replica",
    "CentralStorageStrategyV1": "its variables are not copied to each replica",
}


def check_strategy(strategy: Any) -> None:
    """Refuses a distribution strategy under which a step cannot be atomic.

    Args:
        strategy: A `tf.distribute.Strategy`.

    Raises:
        ValueError: If replicas cannot skip a step together under it.
    """
    name = type(strategy).__name__
    if name in _REFUSED:
        raise ValueError(
            f"tfmix cannot scale the loss under {name}: {_REFUSED[name]}, so "
            "the replicas could not skip a step together. Use "
            "MirroredStrategy, MultiWorkerMirroredStrategy, "
            "OneDeviceStrategy or TPUStrategy."
        )


def check_replica_context() -> None:
    """Refuses to apply gradients outside of `strategy.run`.

    Raises:
        ValueError: If called in a cross-replica context.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients must be applied in a replica context. Call "
            "`optimizer.apply(...)` inside the function that you give to "
            "`strategy.run(...)`."
        )


def on_one_replica() -> bool:
    """Returns whether the current strategy has only one replica."""
    return tf.distribute.get_strategy().num_replicas_in_sync == 1


def sum_over_replicas(tensors: list[Any]) -> list[Any]:
    """Sums each tensor over all replicas of all workers; `None`s stay.

    Args:
        tensors: Tensors, `tf.IndexedSlices` or `None`s, the same on each
            replica.

    Returns:
        The sums, in the tensors' own dtypes, equal on all replicas.
    """
    context = tf.distribute.get_replica_context()
    present = [tensor for tensor in tensors if tensor is not None]
    if context.num_replicas_in_sync == 1 or not present:
        return tensors
    sums: dict[int, Any] = {}
    # What is reduced together is packed into one vector, so has one dtype.
    for dtype in dict.fromkeys(tensor.dtype for tensor in present):
        alike = [tensor for tensor in present if tensor.dtype == dtype]
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, alike)
        sums.update(zip(map(id, alike), reduced, strict=True))
    return [None if tensor is None else sums[id(tensor)] for tensor in tensors]


@contextlib.contextmanager
def one_replica(
    keras_variables: Iterable[Any], optimizer: Any = None
) -> Iterator[None]:
    """Lets the code inside see one replica's variables and no strategy.

    Args:
        keras_variables: All `keras.Variable`s that the code inside reads or
            writes. Each stands for this replica's copy until the exit.
        optimizer: The Keras optimizer that the code inside calls, if any. It
            does not sum its gradients: they are summed.
    """
    with contextlib.ExitStack() as undo:
        for each in optimizers.with_nested(optimizer):
            # Without a strategy this saves an operation for each gradient.
            attributes.swap(undo, each, "_all_reduce_sum_gradients", list)
        # On a TPU the step is traced once for all replicas: there are no
        # local copies to show, and no merge calls either.
        if tf.distribute.has_strategy() and not _runs_on_tpu():
            context = _no_strategy()
            for variable in keras_variables:
                if isinstance(variable._value, tf.distribute.DistributedValues):
                    attributes.swap(
                        undo, variable, "_value", variable._value._get()
                    )
            for each in optimizers.with_nested(optimizer):
                attributes.swap(
                    undo, each, "_distribution_strategy", context.strategy
                )
            undo.enter_context(context)
        yield


def local(variable: Any) -> Any:
    """Returns this replica's copy of a plain `tf.Variable`."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return variable._get()
    return variable


def _runs_on_tpu() -> bool:
    return "TPU" in type(tf.distribute.get_strategy()).__name__


@functools.cache
def _no_strategy() -> Any:
    # Each graph has its own stack of strategies; a new graph's is empty.
    with tf.Graph().as_default():
        return tf.distribute.get_replica_context()
