"""A function's value and its derivative, on TensorFlow and on JAX."""

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
    """Computes a function, and returns how gradients go back through it.

    Args:
        function: Maps a list of float tensors to a list of float tensors.
        inputs: Where to compute it.
        sparse: Whether a sparse gradient (`tf.IndexedSlices`) is returned as
            its values alone. Defaults to `False`: it is made dense.

    Returns:
        The outputs, and a function to be called once that turns gradients
        with respect to the outputs (in their dtypes) into gradients with
        respect to the inputs, zeros where nothing depends.
    """
    if keras.backend.backend() == "jax":
        return _jax(function, list(inputs))
    return _tensorflow(function, list(inputs), sparse)


def export_gradient(
    tensor: Any, token: Any, measure: Callable[[Any], Any]
) -> Any:
    """Returns a tensor as it is, and sends what its gradient is elsewhere.

    Args:
        tensor: A float tensor.
        token: A float32 vector; its value is not used. "Its gradient" will be
            `measure(gradient of tensor)`.
        measure: Maps a tensor to a float32 vector of the token's shape.

    Returns:
        A tensor equal to `tensor`.
    """
    if keras.backend.backend() == "jax":
        return _export_jax(tensor, token, measure)
    import tensorflow as tf

    @tf.custom_gradient
    def identity(value: Any, _: Any) -> Any:
        return tf.identity(value), lambda grad: (grad, measure(grad))

    return identity(tensor, token)


def _export_jax(tensor: Any, token: Any, measure: Callable[[Any], Any]) -> Any:
    import jax

    @jax.custom_vjp
    def identity(value: Any, _: Any) -> Any:
        return value

    identity.defvjp(
        lambda value, _: (value, None),
        lambda _, grad: (grad, measure(grad)),
    )
    return identity(tensor, token)


def _jax(
    function: Callable[[Tensors], Tensors], inputs: Tensors
) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    import jax

    outputs, back = jax.vjp(function, inputs)
    return outputs, lambda gradients: back(gradients)[0]


def _tensorflow(
    function: Callable[[Tensors], Tensors], inputs: Tensors, sparse: bool
) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    import tensorflow as tf

    # A tensor given twice would get the sum of both gradients for each.
    inputs = [tf.identity(one) for one in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = function(inputs)

    def dense(gradient: Any, one: Any) -> Any:
        if gradient is None:
            return tf.zeros_like(one)
        if sparse and isinstance(gradient, tf.IndexedSlices):
            return gradient.values
        return tf.convert_to_tensor(gradient)

    def back(gradients: Tensors) -> Tensors:
        found = tape.gradient(outputs, inputs, output_gradients=gradients)
        return [dense(*pair) for pair in zip(found, inputs, strict=True)]

    return outputs, back
