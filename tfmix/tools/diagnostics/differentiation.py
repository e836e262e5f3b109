"""Differentiates functions of tensors, on either backend."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

Tensors = list[Any]


def pullback(
    function: Callable[[Tensors], Tensors],
    inputs: Sequence[Any],
) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    """Computes a function, and returns its outputs and its backward pass.

    The backward pass can be called once. It takes gradients of the outputs, in
    their dtypes, and returns those of the inputs.
    """
    if keras.backend.backend() == "jax":
        import jax

        outputs, back = jax.vjp(function, list(inputs))
        return outputs, lambda gradients: back(gradients)[0]
    import tensorflow as tf

    # If a tensor came twice, both would get the sum of their gradients.
    inputs = [tf.identity(tensor) for tensor in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = function(inputs)

    def dense(gradient: Any, tensor: Any) -> Any:
        if gradient is None:
            return tf.zeros_like(tensor)
        return tf.convert_to_tensor(gradient)

    def gradients_of(gradients: Tensors) -> Tensors:
        of_inputs = tape.gradient(outputs, inputs, output_gradients=gradients)
        return [dense(*pair) for pair in zip(of_inputs, inputs, strict=True)]

    return outputs, gradients_of
