"""Lists the operators and functions in which a number meets a tensor."""

import keras

from tfmix._keras import replacements

OPERATORS = (
    *("__add__", "__radd__", "__sub__", "__rsub__"),
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__pow__", "__neg__", "__abs__"),
)

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    _TENSORS: tuple[type, ...] = (tf.Tensor,)
    _FUNCTIONS: tuple[replacements.Place, ...] = (
        (tf, "where"),
        (tf, "constant"),
        (tf, "cast"),
    )
else:
    import jax
    from jax._src.array import ArrayImpl

    _TENSORS = (ArrayImpl, jax.core.Tracer)
    _FUNCTIONS = ((jax.numpy, "where"),)

# Here the backend casts a NumPy number to the dtype of the tensor.
CAST_NUMBERS = OPERATORS if keras.backend.backend() == "tensorflow" else ()
PLACES: tuple[replacements.Place, ...] = (
    *((tensor, name) for tensor in _TENSORS for name in OPERATORS),
    *_FUNCTIONS,
)
NAMES = tuple(dict.fromkeys(name for _, name in PLACES))
