"""Lists the operators of tensors, and functions beside them, with their ops."""

import keras

from tfmix._keras import replacing

# The op that an operator computes, and whether its factors are in reverse.
OPERATORS = {
    "__add__": ("add", False),
    "__radd__": ("add", True),
    "__sub__": ("subtract", False),
    "__rsub__": ("subtract", True),
    "__mul__": ("multiply", False),
    "__rmul__": ("multiply", True),
    "__truediv__": ("divide", False),
    "__rtruediv__": ("divide", True),
    "__floordiv__": ("floor_divide", False),
    "__rfloordiv__": ("floor_divide", True),
    "__mod__": ("mod", False),
    "__rmod__": ("mod", True),
    "__pow__": ("power", False),
    "__rpow__": ("power", True),
    "__matmul__": ("matmul", False),
    "__rmatmul__": ("matmul", True),
    "__neg__": ("negative", False),
    "__abs__": ("abs", False),
    "__getitem__": ("get_item", False),
}

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    _TENSORS: tuple[type, ...] = (tf.Tensor,)
    _FUNCTIONS: dict[replacing.Place, str] = {
        (tf, "where"): "where",
        (tf, "constant"): "convert_to_tensor",
        (tf, "cast"): "cast",
    }
else:
    import jax
    from jax._src.array import ArrayImpl

    _TENSORS = (ArrayImpl, jax.core.Tracer)
    _FUNCTIONS = {(jax.numpy, "where"): "where"}

# Each place, with the op that it computes and the order of its factors.
PLACES: dict[replacing.Place, tuple[str, bool]] = {
    **{
        (tensor, name): op
        for tensor in _TENSORS
        for name, op in OPERATORS.items()
    },
    **{place: (name, False) for place, name in _FUNCTIONS.items()},
}
