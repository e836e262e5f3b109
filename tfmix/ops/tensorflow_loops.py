"""The weights of recurrent layers in TensorFlow's loops, without XLA.

Each step of Keras's loops would read its weights and round them, which are
larger than what it computes. Here a weight is read and rounded before the loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfmix._keras import kernels, tapes, tracing, variables
from tfmix.ops import exact_values

# Multiplies a gradient by a power of two.
Enlarge = Callable[[Any, float], Any]


class Held:
    """What a loop has of a weight.

    Attributes:
        narrow: The 16-bit weight of all steps.
        power: The power of two that multiplies the sum of the gradients of all
            steps; `None` until the gradient of a step is traced.
    """

    def __init__(self, narrow: Any) -> None:
        self.narrow = narrow
        self.power: float | None = None

    def left_of(self, power: float) -> float:
        """Returns the part of a power of two that multiplies each step."""
        if self.power is None:
            self.power = power
        return power / self.power


class Loop:
    """The weights of a loop whose steps change none."""

    def __init__(self, enlarge: Enlarge) -> None:
        """Makes it in the graph around the loop."""
        self._enlarge = enlarge
        self._graph = tf.compat.v1.get_default_graph()
        # With each variable, because the `id` of a freed one is used again.
        self._read: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        # With each weight, for the same reason.
        self._held: dict[int, tuple[Any, Held]] = {}

    def is_traced(self) -> bool:
        """Returns whether the body of the loop is traced."""
        return tracing.is_body_in(self._graph)

    def read(self, value: Any, dtype: str) -> tuple[Any, Any]:
        """Returns a variable and its 16-bit copy."""
        name = id(value), dtype
        if name not in self._read:
            with self._graph.as_default():
                weight = variables.read(value)
                copy = kernels.cast(weight, dtype)
                self._read[name] = value, self._hold(weight, copy), copy
        return self._read[name][1:]

    def computed(self, given: Sequence, compute: Callable[[], Any]) -> Any:
        """Returns copies of what is computed from weights alone.

        It is computed before the loop, if it can be.

        Args:
            given: All tensors, copies of weights among them.
            compute: Returns a nest of 16-bit copies.
        """
        are_before = all(tensor.graph is self._graph for tensor in given)
        if not (are_before and self.is_traced()):
            return compute()
        with self._graph.as_default():
            result = compute()
            for copy in tf.nest.flatten(result):
                weight = exact_values.weight_of(copy)
                if weight is not None:
                    exact_values.weight_copy(self._hold(weight, copy), copy)
        return result

    def held(self, weight: Any) -> Held | None:
        """Returns what the loop has of a weight, while its body is traced."""
        if not self.is_traced():
            return None
        return self._held.get(id(weight), (None, None))[1]

    def _hold(self, weight: Any, copy: Any) -> Any:
        """Returns a weight for the steps.

        In float16 the gradient of a step is a sum divided by a power of two.
        All of them are multiplied at once, after the loop.
        """
        held = Held(tf.stop_gradient(copy))

        def after_loop(total: Any) -> list:
            power = held.power
            return [total if power is None else self._enlarge(total, power)]

        if tapes.may_be_asked():
            (weight,) = tapes.replaced([weight], [weight], [], after_loop)
        self._held[id(weight)] = weight, held
        return weight
