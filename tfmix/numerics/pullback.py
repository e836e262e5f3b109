"""A function's value and its derivative, on TensorFlow and on JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

Tensors = list[Any]


def pullback(
    function: Callable[[Tensors], Tensors], inputs: Sequence[Any]
) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    """Computes a function, and returns how gradients go back through it.

    Args:
        function: Maps a list of float tensors to a list of float tensors.
        inputs: Where to compute it.

    Returns:
        The outputs, and a function to be called once that turns gradients
        with respect to the outputs (in their dtypes) into gradients with
        respect to the inputs. Those are dense, zeros where nothing depends.
    """
    if keras.backend.backend() == "jax":
        return _jax(function, list(inputs))
    return _tensorflow(function, list(inputs))


def _jax(
    function: Callable[[Tensors], Tensors], inputs: Tensors
) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    import jax

    outputs, back = jax.vjp(function, inputs)
    return outputs, lambda gradients: back(gradients)[0]


def _tensorflow(
    function: Callable[[Tensors], Tensors], inputs: Tensors
) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    import tensorflow as tf

    # A tensor given twice would get the sum of both gradients for each.
    inputs = [tf.identity(one) for one in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = function(inputs)

    def back(gradients: Tensors) -> Tensors:
        found = tape.gradient(outputs, inputs, output_gradients=gradients)
        return [
            tf.zeros_like(one)
            if gradient is None
            else tf.convert_to_tensor(gradient)
            for one, gradient in zip(inputs, found, strict=True)
        ]

    return outputs, back
