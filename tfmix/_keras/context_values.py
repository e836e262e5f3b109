"""Values that hold for the code of a block, and what it calls."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def set_to(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    """Gives a context variable a value for a block, in this thread alone."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
