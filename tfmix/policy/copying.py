"""A second model like the first: same weights, nothing shared.

Reaches into `keras.src`; checked on Keras 3.12.4 and 3.15.1.
"""

import contextlib
import copy
import importlib
from typing import Any

import keras

from tfmix.policy import carrying, state


def copied(model: Any) -> Any:
    """Copies a model through Keras's own saving, optimizer included.

    Args:
        model: A Keras model.

    Returns:
        The copy.

    Raises:
        TypeError: If Keras cannot save and load the model.
    """
    own = {
        type(layer).__name__: type(layer)
        for layer in model._flatten_layers()
        if type(layer).__module__.split(".")[0] != "keras"
    }
    # What the model's own code makes without a dtype gets the source's.
    before = carrying.carried_policy(model) or model.dtype_policy
    try:
        with (
            keras.saving.custom_object_scope(own),
            state.policy_scope(before),
            _trusting(),
        ):
            return copy.deepcopy(model)
    except Exception as error:
        raise TypeError(
            "`model` cannot be copied: Keras cannot save and load it. "
            f"Received: model={model!r}. Give its classes a `get_config` "
            "with all arguments of their constructors, or convert it in "
            "place: apply_policy(model, policy)."
        ) from error


def _trusting() -> contextlib.AbstractContextManager:
    """Lets Lambda layers load: their code is the caller's, not a file's."""
    module = importlib.import_module("keras.src.saving.serialization_lib")
    scope = getattr(module, "SafeModeScope", None)
    return contextlib.nullcontext() if scope is None else scope(False)


def forget_training(model: Any) -> None:
    """Leaves a model only what prediction needs.

    Args:
        model: A Keras model, changed in place.
    """
    model.trainable = False
    model.compiled = False
    model.optimizer = None
