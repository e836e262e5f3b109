"""A note from `unscale_gradients` to the next `apply`: already divided."""

from typing import Any

import keras
from keras import ops

_UNUSED, _FINITE, _NOT_FINITE = 0, 1, 2


class UnscaledNote:
    """Remembers that the gradients on their way are true ones already.

    Under TensorFlow the note is a variable, so that it also holds when the
    two calls stand in functions compiled apart. It is no part of a
    checkpoint: a step is never saved halfway. The finiteness is noted before
    the user clips, since clipping by value turns an infinity into a number.
    """

    def __init__(self) -> None:
        """Starts without a note; `apply` pays for it only once it is used."""
        self._used = False
        self._note: Any = None
        self._variable = None
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            self._variable = tf.Variable(
                _UNUSED,
                dtype=tf.int32,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
                name="unscaled_note",
            )

    def leave(self, is_finite: Any) -> None:
        """Notes that the gradients were divided, and if they were finite."""
        self._used = True
        note = ops.where(is_finite, _FINITE, _NOT_FINITE)
        if self._variable is None:
            self._note = note
        else:
            self._variable.assign(ops.cast(note, "int32"))

    def take(self) -> Any:
        """Returns the note, an integer scalar or `None`, and clears it."""
        if not self._used:
            return None
        if self._variable is None:
            note, self._note = self._note, None
            return note
        note = self._variable.read_value()
        self._variable.assign(_UNUSED)
        return note


def divisor(note: Any, scale: Any) -> Any:
    """Returns what the gradients are still to be divided by."""
    if note is None:
        return scale
    return ops.where(ops.equal(note, _UNUSED), scale, 1.0)


def seen_bad(note: Any) -> list[Any]:
    """Returns [1] if the user saw non-finite gradients, else [0] or []."""
    if note is None:
        return []
    return [ops.cast(ops.equal(note, _NOT_FINITE), "int32")]
