"""What a model saves of the arguments of its `compile`."""

from typing import Any

import keras


def adopt_optimizer(model: keras.Model, optimizer: Any) -> None:
    """Makes an optimizer the compiled model's, also in what it saves."""
    # Keras would save the one `compile` was given, without its state.
    model.optimizer = optimizer
    save_argument(model, "optimizer", optimizer)


def save_argument(model: keras.Model, name: str, value: Any) -> None:
    """Sets an argument of `compile` in what a model saves of it."""
    saved = getattr(model, "_compile_config", None)
    if saved is not None:
        saved.config[name] = value
