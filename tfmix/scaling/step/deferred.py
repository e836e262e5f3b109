"""Large gradients that are computed once it is known that they are applied.

No variable may change before every gradient is known to be finite, so a step
holds all gradients at once and reads each of them once more from memory. But
a gradient of the mixed policies is a cast from half its size, and that of a
dense kernel a product of two matrices, which are small if the batch is small,
and whose norms bound it. So the step holds those, and the branch that applies
it computes the gradient again, next to its update. What computed it before
has no reader left, and TensorFlow drops it.

For steps of large models that TensorFlow runs operation by operation. XLA
orders its own; and in a branch kept whole, products have other kernels.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfmix.scaling.step import blocks

# Elements of a gradient worth it: 1 MiB of float32.
_LARGE = 2**18
# Not float16: a product's norms do not tell whether it, or a cast of it on the
# way, stays below 65,504.
_BOUNDED = (tf.float32, tf.float64, tf.bfloat16)


class Recipe:
    """How to compute a gradient again from tensors of at most half its size.

    Args:
        operations: Those that made it, the last one first.
    """

    def __init__(self, operations: Sequence[tf.Operation]) -> None:
        self._last_to_first = operations

    def computed(self) -> tf.Tensor:
        """Returns the gradient, computed in the present graph."""
        tensors = list(self._last_to_first[-1].inputs)
        for operation in reversed(self._last_to_first):
            with tf.device(operation.device or None):
                tensors = [_repeated(operation, tensors)]
        return tensors[0]

    def squares(self) -> tf.Tensor | None:
        """Returns a bound on its sum of squares, unread; `None` without one.

        By Cauchy's and Schwarz's inequality no number of a product, nor any
        part of the sum that it is, exceeds its factors' Frobenius norms,
        multiplied.
        """
        operation = self._last_to_first[-1]
        if operation.type != "MatMul":
            return None
        left, right = (tf.cast(each, tf.float32) for each in operation.inputs)
        return 4.0 * tf.nn.l2_loss(left) * tf.nn.l2_loss(right)


def deferred(step: Sequence[blocks.Block]) -> list[blocks.Block]:
    """Returns the blocks of a step, with recipes for those worth it.

    Args:
        step: The blocks, which nothing has read yet.
    """
    return [
        dataclasses.replace(block, recipe=_recipe(block.tensor))
        for block in step
    ]


def computed(step: Sequence[blocks.Block]) -> list[blocks.Block]:
    """Returns the blocks, computed in the present graph by their recipes."""
    return [
        dataclasses.replace(block, tensor=block.recipe.computed())
        if block.recipe
        else block
        for block in step
    ]


def _recipe(tensor: Any) -> Recipe | None:
    if not tf.is_symbolic_tensor(tensor):
        return None
    if (tensor.shape.num_elements() or 0) < _LARGE:
        return None
    operations = list(_repeatable(tensor))
    while operations:
        if 2 * _bytes(operations[-1].inputs) <= _bytes([tensor]):
            return Recipe(operations)
        operations.pop()
    return None


def _repeatable(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that made a tensor, if for nothing else."""
    readers = 0
    while tensor.dtype in _BOUNDED and len(tensor.consumers()) == readers:
        operation = tensor.op
        if operation.type in ("Cast", "Identity", "MatMul"):
            yield operation
        if operation.type not in ("Cast", "Identity"):
            return
        (tensor,) = operation.inputs
        readers = 1


def _repeated(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> Any:
    if operation.type == "Cast":
        return tf.cast(inputs[0], operation.outputs[0].dtype)
    if operation.type == "Identity":
        return inputs[0]
    left, right = inputs
    return tf.matmul(
        left,
        right,
        transpose_a=operation.get_attr("transpose_a"),
        transpose_b=operation.get_attr("transpose_b"),
    )


def _bytes(tensors: Iterable[tf.Tensor]) -> float:
    """Returns their size; infinity if a dimension is not known."""
    return sum(
        math.inf
        if tensor.shape.num_elements() is None
        else tensor.shape.num_elements() * tensor.dtype.size
        for tensor in tensors
    )
