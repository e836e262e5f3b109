"""What Keras refuses to load from a file, and not from its own caller."""

import contextlib

from keras.src.saving import serialization_lib


def trusting() -> contextlib.AbstractContextManager:
    """Lets Lambda layers load: their code is the caller's, not a file's."""
    return serialization_lib.SafeModeScope(False)
