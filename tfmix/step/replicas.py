"""Runs one optimizer step per replica, without merge calls.

Keras's optimizers sum gradients and write mirrored variables through
`tf.distribute` merge calls, which may not be inside a `tf.cond`. Here gradients
are summed first. Then every replica takes its step by itself, on its own copies
and without a strategy.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from tfmix._keras import context, optimizers
from tfmix._keras import variables as keras_variables

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

# Under these strategies variables do not live on the replicas, so that a joint
# step cannot be skipped.
_REFUSED = "ParameterServerStrategy", "CentralStorageStrategy"


def check_strategy(strategy: Any = None) -> None:
    """Refuses a strategy, else the current one, that cannot skip a step."""
    if keras.backend.backend() != "tensorflow":
        return
    name = type(strategy or tf.distribute.get_strategy()).__name__
    if name.startswith(_REFUSED):
        raise ValueError(
            f"tfmix cannot scale the loss under {name}: its variables do not "
            "live on the replicas, so these could not skip a step together. "
            "Use MirroredStrategy, MultiWorkerMirroredStrategy, "
            "OneDeviceStrategy or TPUStrategy."
        )


def check_replica_context() -> None:
    """Refuses a strategy that cannot skip, and steps outside of its `run`."""
    check_strategy()
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients must be applied in a replica context. Call "
            "`optimizer.apply(...)` inside the function that you give to "
            "`strategy.run(...)`."
        )


def once_for_all(
    function: Callable[[], None], variables: Sequence = ()
) -> None:
    """Calls a function that creates variables once for all replicas.

    Args:
        function: The function. It is not part of the function that TensorFlow
            traces now.
        variables: The variables whose values it reads.
    """
    if not _has_replicas() or tf.distribute.in_cross_replica_context():
        with keras_variables.outside_of_tracing(variables):
            function()
        return
    check_strategy()

    def made(strategy: Any) -> None:
        # In the traced function, one replica's first value would be read from
        # another's variable.
        with tf.init_scope(), strategy.scope():
            function()

    tf.distribute.get_replica_context().merge_call(made)


def sum_gradients(grads: Sequence, variables: Sequence) -> list:
    """Sums each gradient over all replicas of all workers; `None`s stay."""
    # Some values overwrite their variable (Keras's scales of quantized products
    # and histories of maxima). The largest of these is used.
    result = list(grads)
    present = [n for n, gradient in enumerate(result) if gradient is not None]
    if not _has_replicas() or not present:
        return result
    check_replica_context()
    around = tf.distribute.get_replica_context()
    if around.num_replicas_in_sync == 1:
        return result
    sums: dict[Any, list[int]] = collections.defaultdict(list)
    for n in present:
        if keras_variables.is_overwritten(variables[n]):
            rows = around.all_gather(grads[n][tf.newaxis], axis=0)
            result[n] = _largest(rows)
        else:
            result[n] = _gathered(grads[n])
            sums[result[n].dtype].append(n)
    # Tensors of one reduction are packed into a vector, so they share a dtype.
    for alike in sums.values():
        totals = around.all_reduce(
            tf.distribute.ReduceOp.SUM, [result[n] for n in alike]
        )
        for n, total in zip(alike, totals, strict=True):
            result[n] = total
    return result


def _gathered(gradient: Any) -> Any:
    # TensorFlow gathers sparse rows, but none in bfloat16.
    if isinstance(gradient, tf.IndexedSlices) and gradient.dtype == tf.bfloat16:
        return tf.cast(gradient, tf.float32)
    return gradient


def _largest(rows: Any) -> Any:
    # This adds zero, or NaN if a row holds a number that is not finite.
    return tf.reduce_max(rows, axis=0) + tf.reduce_sum(rows * 0, axis=0)


@contextlib.contextmanager
def one_replica(
    these: Iterable, optimizer: optimizers.Optimizer | None = None
) -> Iterator[None]:
    """Makes variables mean this replica's copies, without a strategy.

    Args:
        these: The variables.
        optimizer: An optimizer that must not sum gradients meanwhile.
    """
    with contextlib.ExitStack() as stack:
        strategy = None
        # A TPU's step is traced once for all replicas, without local copies or
        # merge calls.
        if _has_replicas() and not context.for_tpu():
            around = _no_strategy()
            strategy = around.strategy
            stack.enter_context(keras_variables.local_copies(these))
            stack.enter_context(around)
        if optimizer is not None:
            stack.enter_context(
                optimizers.without_reduction(optimizer, strategy)
            )
        yield


def _has_replicas() -> bool:
    on_tensorflow = keras.backend.backend() == "tensorflow"
    return on_tensorflow and tf.distribute.has_strategy()


@functools.cache
def _no_strategy() -> Any:
    # Each graph has its own stack of strategies; a new graph's is empty.
    with tf.Graph().as_default():
        return tf.distribute.get_replica_context()
