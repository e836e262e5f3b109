"""`float32_output`: a last layer that turns 16-bit results into float32."""

from collections.abc import Callable
from typing import Any

import keras


def float32_output(
    activation: str | Callable[..., Any] | None = None, name: str | None = None
) -> keras.layers.Activation:
    """Makes the model's last layer: a cast to float32, then an activation.

    Use it after the last matmul. That stays in 16 bit, where the hardware is
    fast, while softmax and loss compute in float32. In 16 bit a softmax loses
    the gradient of samples that are confidently wrong. The inputs are 16-bit:
    for predictions beyond float16's 65504, use a last layer with
    `dtype="float32"` instead.

    Args:
        activation: Name or function, as for `keras.layers.Activation`.
            Defaults to none: the values are only cast.
        name: String, the layer's name. Defaults to one Keras makes.

    Returns:
        A plain `keras.layers.Activation` with `dtype="float32"`; a model
        saved with it loads without tfmix. It takes float tensors of any
        shape and returns float32 of the same shape.

    Raises:
        TypeError: If `activation` is neither name nor function.
        ValueError: If it is a name Keras does not know.

    Examples:
        >>> layer = float32_output("softmax")
        >>> logits = keras.ops.zeros((1, 2), dtype="float16")
        >>> keras.backend.standardize_dtype(layer(logits).dtype)
        'float32'
    """
    _check(activation)
    return keras.layers.Activation(
        activation or "linear", dtype="float32", name=name
    )


def _check(activation: Any) -> None:
    is_kind = isinstance(activation, keras.Layer | type)
    is_function = callable(activation) or isinstance(activation, str | None)
    if is_kind or not is_function:
        raise TypeError(
            "`activation` must be the name of an activation, such as "
            "'softmax', a function, or None. Received: "
            f"activation={activation!r} of type {type(activation).__name__}. "
            "To apply it to a tensor, write float32_output('softmax')(x)."
        )
