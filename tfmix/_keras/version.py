"""Refuses a Keras version or backend that tfmix cannot work with."""

import importlib
import pkgutil
import re

try:
    import keras
except ModuleNotFoundError as error:
    raise ImportError(
        "tfmix needs Keras and its backend, TensorFlow or JAX. Received: no "
        f"module {error.name!r}. Run `pip install 'keras>=3.12' tensorflow`. "
        "To train on JAX without TensorFlow, run `pip install 'keras>=3.12' "
        "jax` and set the environment variable KERAS_BACKEND to 'jax'."
    ) from error

BACKENDS = ("tensorflow", "jax")
OLDEST_KERAS = (3, 12)
# Newer versions may have changed their private names.
NEWEST_SEEN = (3, 15)


def require_supported(
    version: str = keras.__version__, backend: str = keras.backend.backend()
) -> None:
    """Raises `ImportError` for an unsupported version or backend."""
    # This runs before any other module of tfmix is imported, so that the first
    # error a user sees says what to change.
    if numbers(version) < OLDEST_KERAS:
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


def require_private_names(version: str = keras.__version__) -> None:
    """Raises `ImportError` for a newer Keras that lacks what tfmix uses."""
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    try:
        for module in pkgutil.iter_modules(folder):
            importlib.import_module(f"{package}.{module.name}")
    except (AttributeError, ImportError) as error:
        if numbers(version) <= NEWEST_SEEN:
            raise
        raise misfit(str(error), version) from error


def misfit(what: str, version: str = keras.__version__) -> ImportError:
    """Returns the error for a Keras that lacks what tfmix needs."""
    newest = ".".join(map(str, NEWEST_SEEN))
    return ImportError(
        "tfmix needs something private of Keras that this version does not "
        f"have: {what}. Received: keras.__version__={version!r}; Keras "
        f"{newest} is the newest that tfmix was tried with. Run `pip install "
        f"'keras=={newest}.*'`, or upgrade tfmix."
    )


def numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
