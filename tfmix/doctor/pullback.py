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

    The second result is to be called once. It turns gradients of the outputs,
    in their dtypes, into gradients of the inputs, zeros where nothing depends.
    With `sparse`, a `tf.IndexedSlices` is returned as its values alone.
    """
    if keras.backend.backend() == "jax":
        return _jax(function, list(inputs))
    return _tensorflow(function, list(inputs), sparse)


def export_gradient(
    tensor: Any, token: Any, measure: Callable[[Any], Any]
) -> Any:
    """Returns a tensor unchanged, and measures its gradient.

    The gradient of `token`, a float32 vector whose value is not used, will be
    `measure(gradient of tensor)`.
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
