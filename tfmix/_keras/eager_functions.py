"""Runs a user's `tf.function`s op by op, in one thread only.

`tf.config.run_functions_eagerly` would do so for the whole process. Every
`tf.function` reads the property that is replaced here before each call.
Checked on TensorFlow 2.20 and 2.21.
"""

import contextlib
import importlib
import threading
from collections.abc import Iterator

import keras

_NAME = "_run_functions_eagerly"
_lock = threading.Lock()
# How many blocks each thread is in; what is replaced comes back when none is.
_blocks: dict[int, int] = {}
_originals: list[property] = []


@contextlib.contextmanager
def nothing_traced() -> Iterator[None]:
    """Makes `tf.function`s that this thread calls run eagerly in a block."""
    if keras.backend.backend() != "tensorflow":
        yield
        return
    thread = threading.get_ident()
    with _lock:
        if not _blocks:
            _install()
        _blocks[thread] = _blocks.get(thread, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _blocks[thread] -= 1
            if not _blocks[thread]:
                del _blocks[thread]
            if not _blocks:
                setattr(_function_class(), _NAME, _originals.pop())


def _install() -> None:
    owner = _function_class()
    original = vars(owner)[_NAME]
    _originals.append(original)

    def is_eager(function: object) -> bool:
        if threading.get_ident() in _blocks:
            return True
        return bool(original.__get__(function, type(function)))

    setattr(owner, _NAME, property(is_eager))


def _function_class() -> type:
    module = importlib.import_module(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function"
    )
    function: type = module.Function
    return function
