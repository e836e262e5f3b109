"""Keras's own policy: where it is kept, read and written.

Keras keeps it per thread and drops it in `clear_session()`. All its code
reads and writes it through two functions, looked up as attributes of their
module, so replacing those two reaches every thread and every caller.

Checked on Keras 3.12.4 and 3.15.1.
"""

import importlib
from typing import Any

import keras

from tfmix._keras import attributes

KEY = "dtype_policy"


def getter() -> attributes.Place:
    """Returns the place of the function `(name, *defaults) -> value`."""
    return _global_state(), "get_global_attribute"


def setter() -> attributes.Place:
    """Returns the place of the function `(name, value) -> None`."""
    return _global_state(), "set_global_attribute"


def name() -> str:
    """Returns the name of Keras's own policy in the calling thread."""
    own = getattr(_global_state().GLOBAL_STATE_TRACKER, KEY, None)
    return keras.config.floatx() if own is None else str(own.name)


def make_float32() -> None:
    """Sets Keras's own policy of this thread to float32, unless it is."""
    if name() != "float32":
        tracker = _global_state().GLOBAL_STATE_TRACKER
        setattr(tracker, KEY, keras.DTypePolicy("float32"))


def _global_state() -> Any:
    return importlib.import_module("keras.src.backend.common.global_state")
