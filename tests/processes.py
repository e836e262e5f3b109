"""Python in a process of its own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def python(*words, cwd=ROOT, check=False, **variables):
    """Runs Python beside our source tree; returns what it printed.

    Args:
        *words: The arguments.
        cwd: The folder.
        check: Whether to raise an error if it fails.
        **variables: Environment variables besides those of this process.
    """
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=check,
    )
