"""A float32 view: a variable for the optimizer that stores nothing itself.

Subclasses `keras.Variable` and fills its private attributes; under TensorFlow
the optimizers unwrap `variable.value` and assign to that, so a view is its
own value. Checked on Keras 3.12.4 and 3.15.1.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix._keras import optimizers


class Float32View(keras.Variable):
    """Looks like a float32 variable and stores a model's 16-bit variable.

    Every read puts the float32 value together and every assignment takes it
    apart, so it holds inside `tf.cond`, `jax.jit` and stateless scopes alike.
    Subclasses define `load` and `store`.

    Args:
        variable: The model's `keras.Variable`.
    """

    # While the slots are created, where TensorFlow places them: beside the
    # variable behind the view.
    colocating = False

    def __init__(self, variable: Any) -> None:
        self.stored = variable
        self._name = variable.name
        self._shape = tuple(variable.shape)
        self._ndim = len(self._shape)
        self._dtype = "float32"
        self._autocast = False
        self._aggregation = variable.aggregation
        self._synchronization = getattr(variable, "_synchronization", "auto")
        self._layout = getattr(variable, "_layout", None)
        self._overwrite_with_gradient = False
        self._initializer = None
        self._regularizer = None
        self._constraint = None
        self._value = None
        optimizers.adopt(self, variable)

    def load(self) -> Any:
        """Returns the float32 value as a tensor."""
        raise NotImplementedError

    def store(self, value: Any) -> None:
        """Keeps a float32 tensor."""
        raise NotImplementedError

    @property
    def value(self) -> Any:
        """The float32 tensor; under TensorFlow the view, to be assigned to."""
        if keras.backend.backend() != "tensorflow":
            return self.load()
        return self.stored.value if self.colocating else self

    def assign(self, value: Any, **kwargs: Any) -> Any:
        """Stores a value.

        Args:
            value: Tensor or array of the view's shape, any float dtype.
            **kwargs: What `tf.Variable.assign` takes; without effect.

        Returns:
            The value as a float32 tensor.
        """
        value = ops.cast(_dense(value), "float32")
        self.store(value)
        return value

    def assign_add(self, value: Any, **kwargs: Any) -> Any:
        """Adds a value; see `assign`."""
        return self.assign(ops.add(self.load(), _dense(value)))

    def assign_sub(self, value: Any, **kwargs: Any) -> Any:
        """Subtracts a value; see `assign`."""
        return self.assign(ops.subtract(self.load(), _dense(value)))

    # What Keras calls for `tf.IndexedSlices`.
    scatter_add = assign_add
    scatter_sub = assign_sub

    def numpy(self) -> np.ndarray:
        """Copies the float32 value to the host."""
        return ops.convert_to_numpy(self.load())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        value = self.load()
        return value if dtype is None else ops.cast(value, dtype)

    def __jax_array__(self) -> Any:
        return self.load()

    def _serialize_to_tensors(self) -> dict:
        # Nothing of its own for a checkpoint: the model saves its variable,
        # the wrapper what stands beside it.
        return {}

    def _restore_from_tensors(self, restored_tensors: dict) -> None:
        pass

    @property
    def _unique_id(self) -> str:
        # The key under which an optimizer finds the slots of a variable; it
        # is asked with one replica's copy, or while slots are created, too.
        return optimizers.key(self.stored)


def _dense(value: Any) -> Any:
    return ops.convert_to_tensor(value)
