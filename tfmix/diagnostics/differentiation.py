"""Gradients of functions of tensors, by either backend."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

Tensors = list[Any]


def pullback(
    function: Callable[[Tensors], Tensors],
    inputs: Sequence[Any],
    *,
    sparse: bool = False,
) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    """Computes a function, and returns how gradients go back through it, once.

    Gradients of the outputs, in their dtypes, become those of the inputs. With
    `sparse`, a `tf.IndexedSlices` is returned as its values alone.
    """
    if keras.backend.backend() == "jax":
        import jax

        outputs, back = jax.vjp(function, list(inputs))
        return outputs, lambda gradients: back(gradients)[0]
    import tensorflow as tf

    # A tensor given twice would get the sum of both gradients for each.
    inputs = [tf.identity(tensor) for tensor in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = function(inputs)

    def dense(gradient: Any, tensor: Any) -> Any:
        if gradient is None:
            return tf.zeros_like(tensor)
        if sparse and isinstance(gradient, tf.IndexedSlices):
            return gradient.values
        return tf.convert_to_tensor(gradient)

    def gradients_of(gradients: Tensors) -> Tensors:
        of_inputs = tape.gradient(outputs, inputs, output_gradients=gradients)
        return [dense(*pair) for pair in zip(of_inputs, inputs, strict=True)]

    return outputs, gradients_of


def export_gradient(
    tensor: Any, token: Any, measure: Callable[[Any], Any]
) -> Any:
    """Returns a tensor unchanged, and measures its gradient.

    That becomes the gradient of `token`, a float32 vector that is not used.
    """

    def back(grad: Any) -> tuple[Any, Any]:
        return grad, measure(grad)

    if keras.backend.backend() == "jax":
        import jax

        identity = jax.custom_vjp(lambda value, _: value)
        identity.defvjp(lambda value, _: (value, None), lambda _, g: back(g))
    else:
        import tensorflow as tf

        identity = tf.custom_gradient(
            lambda value, _: (tf.identity(value), back)
        )
    return identity(tensor, token)
