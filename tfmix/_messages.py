"""tfmix's messages, which go to absl's log and begin with `tfmix:`.

`absl.logging.set_verbosity("error")` silences them and Keras's warnings, and
"info" shows more of them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from absl import logging

_said_once: set[Any] = set()
# A token for each open `silenced` block, outer ones included.
_silencers: list[object] = []


def warn(text: str, *values: Any) -> None:
    """Logs a warning; `%` puts the values into the text."""
    if not _silencers:
        logging.warning("tfmix: " + text, *values)


def warn_once(text: str, *values: Any, about: Any = None) -> None:
    """Warns once per process, or once per value of `about`."""
    key = text if about is None else about
    if key not in _said_once:
        _said_once.add(key)
        warn(text, *values)


def info(text: str, *values: Any) -> None:
    """Logs information that needs no action."""
    if not _silencers:
        logging.info("tfmix: " + text, *values)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Logs nothing inside a block."""
    token = object()
    _silencers.append(token)
    try:
        yield
    finally:
        _silencers.remove(token)


# absl names the file and line of the caller where it prints them.
for _name in ("warn", "warn_once", "info"):
    logging.get_absl_logger().register_frame_to_skip(__file__, _name)
