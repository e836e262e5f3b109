"""Refuses, at import, a Keras that tfmix cannot work with."""

import keras

BACKENDS = ("tensorflow", "jax")
OLDEST_KERAS = (3, 12)


def require_supported(version: str, backend: str) -> None:
    """Checks the version of Keras and the backend it runs on.

    Called once by `import tfmix`, before any other module of tfmix, so that
    the first error a user sees is the one that says what to change.

    Args:
        version: Keras's version, `keras.__version__`.
        backend: The backend's name, `keras.backend.backend()`.

    Raises:
        ImportError: If Keras is older than 3.12, or runs on a backend other
            than TensorFlow and JAX.

    Example:
        >>> require_supported("3.15.1", "jax")
    """
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


def require_supported_keras() -> None:
    """Checks the Keras that is installed.

    Raises:
        ImportError: See `require_supported`.
    """
    require_supported(keras.__version__, keras.backend.backend())
