"""A loop that skips step after step says so, once.

In `fit` the line after the epoch does; a loop of one's own has no epochs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfmix import _messages
from tfmix._keras import compilation

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
else:
    import jax

# A loss scale that falls from its first value to its best one skips fewer.
AFTER = 8


class Watch:
    """Counts the skipped steps in a row of one optimizer, on the host.

    Args:
        name: String, the optimizer's.
        paths: The paths of its variables.
    """

    def __init__(self, name: str, paths: Sequence[str]) -> None:
        self._name, self._paths = name, list(paths)
        self._applied: int | None = None
        self._skips = 0
        self._said = False

    def skipped(self, applied: Any, bad: Any) -> None:
        """Counts a skipped step, and warns of the eighth in a row.

        Args:
            applied: Integer, the steps applied before. A skipped step leaves
                it alone, so that it tells whether one was applied between.
            bad: Booleans, the variables whose gradient was not finite.
        """
        again = self._applied == int(applied)
        self._applied, self._skips = int(applied), self._skips * again + 1
        if self._skips >= AFTER:
            self.warn(bad)

    def warn(self, bad: Any) -> None:
        """Warns that the loop stands still, unless it was said before.

        Args:
            bad: Booleans, the variables whose gradient was not finite.
        """
        if self._said:
            return
        self._said = True
        pairs = zip(self._paths, bad, strict=True)
        lost = [path for path, is_bad in pairs if is_bad]
        _messages.warn(
            "%r has skipped %d steps in a row, and no weight changes: %s",
            self._name,
            AFTER,
            _cause(lost, len(self._paths)),
        )


def _cause(lost: Sequence[str], count: int) -> str:
    ask = "`tfmix.check(model, x, y)` names the place"
    if len(lost) == count:
        return (
            "all gradients are NaN or infinite. Most likely the loss is, "
            "because of NaN or infinity in the data or a learning rate that "
            f"is too high; {ask}."
        )
    # A fault spreads from the output towards the input.
    last = lost[-1] if lost else "?"
    return (
        f"{len(lost)} of {count} gradients are NaN or infinite, nearest the "
        f'output that of {last!r}. Give its layer `dtype="float32"`, or '
        f"lower the learning rate; {ask}."
    )


def call_if(condition: Any, function: Callable, *values: Any) -> None:
    """Calls a function on the host, where a condition holds on the device.

    Where it does not hold, nothing waits and nothing is copied. XLA calls no
    host under TensorFlow: what it compiles says nothing.

    Args:
        condition: Bool or boolean scalar tensor.
        function: Takes NumPy arrays.
        *values: Tensors for it.
    """
    if keras.backend.backend() == "jax":
        _call_if(condition, function, *values)
    elif tf.executing_eagerly():
        if condition:
            function(*(value.numpy() for value in values))
    elif not compilation.by_xla():

        def call() -> Any:
            tf.numpy_function(function, list(values), [])
            return tf.constant(True)

        tf.cond(condition, call, lambda: tf.constant(False))


if keras.backend.backend() == "jax":

    @functools.partial(jax.jit, static_argnums=1)
    def _call_if(condition: Any, function: Callable, *values: Any) -> None:
        def call() -> None:
            jax.debug.callback(function, *values)

        jax.lax.cond(condition, call, lambda: None)
