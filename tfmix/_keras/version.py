"""Refuses, at import, a Keras that tfmix cannot work with."""

import keras

BACKENDS = ("tensorflow", "jax")
OLDEST_KERAS = (3, 12)


def require_supported(
    version: str = keras.__version__, backend: str = keras.backend.backend()
) -> None:
    """Raises `ImportError` for a version or backend that tfmix does not fit."""
    # Called before any other module of tfmix is imported, so that the first
    # error a user sees is the one that says what to change.
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST_KERAS:
        raise ImportError(
            "tfmix needs Keras 3.12 or newer. "
            f"Received: keras.__version__={version!r}. "
            "Run `pip install --upgrade 'keras>=3.12'`."
        )
    if backend not in BACKENDS:
        raise ImportError(
            "tfmix works on Keras's backends 'tensorflow' and 'jax'. "
            f"Received: keras.backend.backend()={backend!r}. "
            "Set the environment variable KERAS_BACKEND to 'tensorflow' or "
            "'jax' before Keras is imported, for example "
            "`KERAS_BACKEND=tensorflow python script.py`."
        )
