"""Where Keras adds up what a model is trained on besides its loss.

Checked on Keras 3.12.4 and 3.15.1.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras

from tfmix._keras import attributes


def trainer() -> type:
    """Returns the class that gives models `compile` and `fit`."""
    module = importlib.import_module("keras.src.trainers.trainer")
    found: type = module.Trainer
    return found


def penalty_places() -> list[attributes.Place]:
    """Lists the methods that take penalties: regularizers, added losses."""
    regularizers = _own_classes(keras.regularizers.Regularizer, "__call__")
    return [
        *((one, "__call__") for one in regularizers),
        (keras.Layer, "add_loss"),
        # Losses that were added before tfmix had a say, on their way into
        # the sum with the compiled loss, where TensorFlow mixes no dtypes.
        (trainer(), "_aggregate_additional_loss"),
    ]


def _own_classes(base: type, method: str) -> Iterator[type]:
    """Yields Keras's own subclasses that write a method themselves."""
    subclass: type
    for subclass in type.__subclasses__(base):
        if subclass.__module__.startswith("keras.src."):
            if inspect.isfunction(vars(subclass).get(method)):
                yield subclass
            yield from _own_classes(subclass, method)


def adopt_optimizer(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> None:
    """Makes an optimizer the compiled model's, also in what it saves.

    Keras saves the optimizer `compile` was given, not the one made of it, and
    drops its state when it is loaded under another policy.
    """
    model.optimizer = optimizer
    save_compile_argument(model, "optimizer", optimizer)


def save_compile_argument(model: keras.Model, name: str, value: Any) -> None:
    """Sets an argument of `compile` in what a model saves of it."""
    saved = getattr(model, "_compile_config", None)
    if saved is not None:
        saved.config[name] = value


def trusting() -> contextlib.AbstractContextManager:
    """Lets Lambda layers load: their code is the caller's, not a file's."""
    module = importlib.import_module("keras.src.saving.serialization_lib")
    scope: contextlib.AbstractContextManager = module.SafeModeScope(False)
    return scope
