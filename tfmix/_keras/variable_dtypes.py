"""The dtype of a variable that exists already, and the storage behind it.

Reaches into `keras.Variable` and `keras.Layer`: `_dtype`, `_trainable`,
`_initialize`, `_trainable_variables`, `_non_trainable_variables`. Checked on
Keras 3.12.4 and 3.15.1.
"""

import contextlib
from typing import Any

import keras
from keras import ops


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the variables a layer itself holds, not those of its layers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def cast_in_place(variable: keras.Variable, dtype: str) -> None:
    """Gives a variable another dtype, keeping its value as far as it fits.

    TensorFlow stores it in another `tf.Variable` afterwards. That one lies
    where the strategy in scope puts it; see `strategy_scope`.
    """
    if not all(hasattr(variable, name) for name in ("_dtype", "_initialize")):
        raise RuntimeError(
            f"tfmix does not fit Keras {keras.__version__}: its variables "
            "cannot be cast in place. Build the model under the policy and "
            "load its weights."
        )
    value = ops.cast(variable.value, dtype)
    before, trainable = variable._dtype, variable._trainable
    variable._dtype = dtype
    # A frozen one may be thawed: as before, its gradients must be recorded.
    variable._trainable = getattr(variable.value, "trainable", trainable)
    try:
        variable._initialize(value)
    except Exception:
        variable._dtype = before
        raise
    finally:
        variable._trainable = trainable


def strategy_scope(
    model: keras.Model,
) -> contextlib.AbstractContextManager[Any]:
    """Opens the scope in which new variables lie beside a model's."""
    strategy = getattr(model, "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()
