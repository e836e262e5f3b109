"""Casts in the input pipeline, where they cost the accelerator nothing."""

from typing import Any

import keras

from tfmix import _formats


def cast(dataset: Any, dtype: str = "float16") -> Any:
    """Casts the float components of a dataset, whatever their nesting.

    Use it as the last step before `prefetch`: half the bytes go to the
    device. Values above 65504 become infinite in float16, and whole numbers
    above 2048 (256 in bfloat16) are rounded, so keep ids as integers.

    Args:
        dataset: A `tf.data.Dataset`; its elements may be nested tuples,
            dicts and dataclasses. Integers, booleans and strings, and sparse
            and ragged tensors of them, pass untouched; float ones are cast.
        dtype: String. `"float16"`, `"bfloat16"` or `"float32"`. Defaults to
            `"float16"`.

    Returns:
        A `tf.data.Dataset` of the same structure.

    Raises:
        TypeError: If `dataset` is no `tf.data.Dataset`.
        ValueError: If `dtype` is none of the three.
        RuntimeError: If Keras does not run on TensorFlow.
    """
    if dtype not in _formats.FORMATS:
        hint = ""
        if isinstance(dtype, str) and dtype.startswith("mixed_"):
            hint = f" Its compute dtype is {dtype.removeprefix('mixed_')!r}."
        raise ValueError(
            f"`dtype` must be one of {sorted(_formats.FORMATS)}. "
            f"Received: dtype={dtype!r}.{hint}"
        )
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "`data.cast` works on a `tf.data.Dataset`, and Keras runs on "
            f"{keras.backend.backend()!r}. Cast the arrays instead: "
            f"x.astype({dtype!r})."
        )
    import tensorflow as tf

    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "`dataset` must be a `tf.data.Dataset`. Received: dataset="
            f"{dataset!r} of type {type(dataset).__name__}. Make one with "
            "tf.data.Dataset.from_tensor_slices((x, y))."
        )

    def cast_leaf(component: Any) -> Any:
        # Nested datasets, of `window` for example, have no dtype.
        own_dtype = getattr(component, "dtype", None)
        if isinstance(own_dtype, tf.DType) and own_dtype.is_floating:
            return tf.cast(component, dtype)
        return component

    # `map` unpacks an element that is a tuple, also one of length 1.
    is_tuple = type(dataset.element_spec) is tuple

    def cast_element(*element: Any) -> Any:
        nest = element if is_tuple else element[0]
        return tf.nest.map_structure(cast_leaf, nest)

    return dataset.map(cast_element, num_parallel_calls=tf.data.AUTOTUNE)
