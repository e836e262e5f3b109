"""The weights of recurrent layers in TensorFlow's loops, without XLA.

Each step of Keras's loops reads its weights, rounds them, and forms a part of
their gradients, which are as large as the weights. Here a weight is read and
rounded before the loop. The steps of its gradient only collect the factors: the
weight's gradient is one product for all rows of all steps.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmix._keras import (
    context_values,
    kernels,
    loops,
    variables,
)
from tfmix.ops import exact_values

# Takes the inputs, the incoming gradient and the 16-bit weight; returns the
# gradient of the weight. A sum does not need the inputs.
OfWeight = Callable[[Any, Any, Any], Any]


class Loop:
    """What a loop has of the weights that its steps read.

    Attributes:
        steps: The number of steps, an integer or a scalar tensor.
        is_constant: Whether no step changes a weight.
    """

    def __init__(self, steps: Any, is_constant: bool) -> None:
        """Makes it in the graph around the loop."""
        self.steps, self.is_constant = steps, is_constant
        self._graph = tf.compat.v1.get_default_graph()
        # With each variable, because the `id` of a freed one is used again.
        self._read: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        # With each weight of a step, for the same reason.
        self._held: dict[int, tuple[Any, Held]] = {}

    def is_traced(self) -> bool:
        """Returns whether the body of the loop is traced."""
        return loops.is_body_in(self._graph)

    def read(self, value: Any, dtype: str) -> tuple[Any, Any]:
        """Returns a variable and its 16-bit copy for a step."""
        name = id(value), dtype
        if name not in self._read:
            with self._graph.as_default():
                weight = variables.read(value)
                copy = kernels.cast(weight, dtype)
                self._note(weight, weight, copy)
            self._read[name] = value, weight, copy
        _, weight, copy = self._read[name]
        if self.is_constant:
            return weight, copy
        current = variables.read(value)
        copy = kernels.cast(current, dtype)
        self._note(current, weight, copy)
        return current, copy

    def computed(self, given: Sequence, compute: Callable[[], Any]) -> Any:
        """Returns copies of what is computed from weights alone.

        It is computed before the loop, if it can be.

        Args:
            given: All tensors, copies of weights among them.
            compute: Returns a nest of 16-bit copies.
        """
        are_before = all(tensor.graph is self._graph for tensor in given)
        if not (self.is_constant and self.is_traced() and are_before):
            return compute()
        with self._graph.as_default():
            result = compute()
            for copy in tf.nest.flatten(result):
                weight = exact_values.weight_of(copy)
                if weight is not None:
                    self._note(weight, weight, copy)
        return result

    def _note(self, current: Any, weight: Any, copy: Any) -> None:
        """Notes what the loop has of the weight of a step."""
        note = Held(self, weight, tf.stop_gradient(copy))
        self._held[id(current)] = current, note

    def held(self, weight: Any) -> "Held | None":
        """Returns what the loop has of a weight, while its body is traced."""
        if not self.is_traced():
            return None
        return self._held.get(id(weight), (None, None))[1]


class Held(NamedTuple):
    """What a loop has of a weight.

    Attributes:
        loop: The loop.
        weight: The float32 weight as it is before the loop.
        narrow: The 16-bit weight of a step.
    """

    loop: Loop
    weight: Any
    narrow: Any

    def lists(self, factors: Sequence, of_weight: OfWeight) -> loops.Lists:
        """Returns lists of what the gradient multiplies in each step.

        Args:
            factors: The inputs of a product, unless it is a sum, and a tensor
                like the incoming gradient.
            of_weight: Returns the gradient of the weight from all rows.
        """

        def of_all(*stacked: Any) -> Any:
            *inputs, upstream = map(_rows, stacked)
            # Only its shape is used.
            narrow = kernels.cast(self.weight, upstream.dtype)
            with context_values.holding(rules=context_values.NO_RULES):
                given = inputs[0] if inputs else None
                return of_weight(given, upstream, narrow)

        return loops.Lists(factors, self.loop.steps, self.weight, of_all)


def _rows(stacked: Any) -> Any:
    """Returns the rows of all steps, one after the other."""
    steps, rows, *rest = stacked.shape.as_list()
    sizes = tf.shape(stacked)
    if steps is None or rows is None:
        steps, rows = sizes[0], sizes[1]
    rest = [sizes[n + 2] if x is None else x for n, x in enumerate(rest)]
    return tf.reshape(stacked, [steps * rows, *rest])
