"""Lists the methods that add penalties to a loss."""

import inspect
from collections.abc import Iterator
from typing import Any

import keras

from tfmix._keras import replacing, training


def _own_classes(base: type[Any], method: str) -> Iterator[type]:
    """Yields Keras's own subclasses that define a method themselves."""
    for subclass in base.__subclasses__():
        if subclass.__module__.startswith("keras.src."):
            if inspect.isfunction(vars(subclass).get(method)):
                yield subclass
            yield from _own_classes(subclass, method)


# These methods compute penalties: regularizers and added losses.
PLACES: tuple[replacing.Place, ...] = (
    *(
        (regularizer, "__call__")
        for regularizer in _own_classes(
            keras.regularizers.Regularizer, "__call__"
        )
    ),
    (keras.Layer, "add_loss"),
    # It sums the added losses. Those from before tfmix was active may be
    # 16-bit, and TensorFlow cannot add them to the compiled loss.
    (training.TRAINER, "_aggregate_additional_loss"),
)
