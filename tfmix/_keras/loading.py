"""Loads layers that Keras refuses to load from files."""

import contextlib

from keras.src.saving import serialization_lib


def trusting() -> contextlib.AbstractContextManager:
    """Lets Lambda layers load, because the code is the caller's own."""
    return serialization_lib.SafeModeScope(False)
