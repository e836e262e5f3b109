"""Keras's own policy: where it is kept, read and written.

Keras keeps it per thread, drops it in `clear_session()`, reads and writes it
through two functions, looked up as attributes of their module: replacing those
two reaches every thread and every caller.
"""

import keras
from keras.src.backend.common import global_state

from tfmix._keras import attributes

KEY = "dtype_policy"


def getter() -> attributes.Place:
    """Returns the place of the function `(name, *defaults) -> value`."""
    return global_state, "get_global_attribute"


def setter() -> attributes.Place:
    """Returns the place of the function `(name, value) -> None`."""
    return global_state, "set_global_attribute"


def name() -> str:
    """Returns the name of Keras's own policy in the calling thread."""
    own = getattr(global_state.GLOBAL_STATE_TRACKER, KEY, None)
    return keras.config.floatx() if own is None else str(own.name)


def make_float32() -> None:
    """Sets Keras's own policy of this thread to float32, unless it is."""
    if name() != "float32":
        tracker = global_state.GLOBAL_STATE_TRACKER
        setattr(tracker, KEY, keras.DTypePolicy("float32"))
