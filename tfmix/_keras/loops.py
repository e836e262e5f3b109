"""Collects what each step of TensorFlow's loops computes."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfmix._keras import tapes

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.ops.control_flow_v2_func_graphs import (
        WhileBodyFuncGraph,
    )


def is_body_in(graph: Any) -> bool:
    """Returns whether the traced code is the body of a loop in this graph."""
    body = tf.compat.v1.get_default_graph()
    return isinstance(body, WhileBodyFuncGraph) and body.outer_graph is graph


class Lists:
    """Lists that the gradient of a loop fills, one element in each step.

    The steps are given empty lists, and return filled ones as their gradients.
    """

    def __init__(
        self,
        tensors: Sequence,
        steps: Any,
        source: Any,
        gradient: Callable[..., Any],
    ) -> None:
        """Makes empty lists before the loop whose body is traced.

        Args:
            tensors: Tensors of the body, each like the elements of a list.
            steps: The number of steps of the loop.
            source: Tensor from before the loop, which gets a gradient.
            gradient: Takes the filled lists, each as a tensor of one more axis;
                returns the gradient of the source.
        """
        self._likes = [(x.shape, x.dtype) for x in tensors]
        self._steps = steps
        body = tf.compat.v1.get_default_graph()
        # TensorFlow's loops begin with a counter of their own.
        self._at = body.inputs[0]

        def of_source(*filled: Any) -> list:
            if any(each is None for each in filled):
                return [None]
            return [gradient(*map(self._stacked, filled, self._likes))]

        with body.outer_graph.as_default():
            empty = [self._empty(*like) for like in self._likes]
            self.empty = tapes.replaced(empty, [source], [], of_source)

    def _empty(self, shape: Any, dtype: Any) -> Any:
        return tf.raw_ops.TensorListReserve(
            element_shape=_sizes(shape),
            num_elements=self._steps,
            element_dtype=dtype,
        )

    def _stacked(self, filled: Any, like: tuple[Any, Any]) -> Any:
        shape, dtype = like
        result = tf.raw_ops.TensorListStack(
            input_handle=filled,
            element_shape=_sizes(shape),
            element_dtype=dtype,
        )
        steps = self._steps if isinstance(self._steps, int) else None
        result.set_shape([steps, *shape])
        return result

    def filled(self, *tensors: Any) -> list:
        """Returns lists with tensors as the elements of the running step."""
        return [
            tf.raw_ops.TensorListSetItem(
                input_handle=self._empty(*like), index=self._at, item=tensor
            )
            for like, tensor in zip(self._likes, tensors, strict=True)
        ]


def _sizes(shape: Any) -> Any:
    """Returns a shape as a tensor, with -1 for what is not known."""
    sizes = [-1 if size is None else size for size in shape.as_list()]
    return tf.constant(sizes, tf.int32)
