"""Shows on a terminal what runs."""

import sys

import rich.console
import rich.status


def shown(what: str) -> rich.status.Status:
    """Shows a moving line on stderr, in a `with` block."""
    is_seen = sys.stderr.isatty()
    return rich.console.Console(stderr=True, quiet=not is_seen).status(what)
