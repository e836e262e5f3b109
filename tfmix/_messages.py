"""The one way in which tfmix says something while a program runs.

`logging.getLogger("tfmix").setLevel("ERROR")` silences it, and "INFO" lets it
say more. Each message is a line on stderr that begins with `tfmix:`.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any


class _Stderr(logging.Handler):
    """Writes to what is `sys.stderr` by then: notebooks and tests swap it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


_said_once: set[str] = set()
LOGGER = logging.getLogger("tfmix")
if not LOGGER.handlers:
    _handler = _Stderr()
    _handler.setFormatter(logging.Formatter("tfmix: %(message)s"))
    LOGGER.addHandler(_handler)
    # The root's handlers, which absl puts there, would say it again.
    LOGGER.propagate = False
    LOGGER.setLevel(logging.WARNING)


def warn(text: str, *values: Any) -> None:
    """Says what may be wrong; the values are put into the text with `%`."""
    LOGGER.warning(text, *values)


def warn_once(text: str) -> None:
    """Says what is as true of the next model, once in a process."""
    if text not in _said_once:
        _said_once.add(text)
        warn(text)


def info(text: str, *values: Any) -> None:
    """Says what is well, to who asks for it."""
    LOGGER.info(text, *values)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Says nothing for a block."""
    before, LOGGER.disabled = LOGGER.disabled, True
    try:
        yield
    finally:
        LOGGER.disabled = before
