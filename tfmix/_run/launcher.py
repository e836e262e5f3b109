"""Starts Python on a script so that it imports tfmix along with Keras.

It does not import tfmix, because that would import Keras, and the script may
still choose a backend.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

_STARTUP = pathlib.Path(__file__).with_name("startup")
FAILED = 2


def run(
    words: Sequence[str],
    policy: str,
    against: str | None = None,
    json_file: str | None = None,
) -> int:
    """Runs a script as `python` would, and returns its exit code.

    Args:
        words: The words after `python`: `["train.py", "--epochs", "3"]`, or
            `["-m", "package.train"]`.
        policy: The policy for the training.
        against: The policy of a second run to compare with.
        json_file: The file for the report as JSON.

    Returns:
        The exit code. On POSIX it returns only if a first run failed, because
        this process becomes the script's.
    """
    # The script may change its folder.
    target = json_file and os.path.abspath(json_file)
    if against is None:
        return _become(words, policy, {"json": target})
    with tempfile.NamedTemporaryFile(suffix=".json", delete=False) as first:
        pass
    quiet = {"json": first.name, "is_quiet": True}
    code = _wait(words, policy, quiet)
    report = pathlib.Path(first.name)
    if code:
        print(
            f"tfmix run: the run in {policy!r} ended with exit code {code}, "
            f"so the one in {against!r} was not started.",
            file=sys.stderr,
        )
    if code or not report.stat().st_size:
        # Without Keras there is nothing to compare.
        report.unlink()
        return code
    compared = {"json": target, "before": first.name, "is_strict": True}
    return _become(words, against, compared)


def _command(
    words: Sequence[str], policy: str, settings: dict[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Returns a command line and its environment."""
    paths = [str(_STARTUP), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TFMIX_POLICY": policy,
        "TFMIX_RUN": json.dumps(settings),
    }
    return [sys.executable, *words], environment


def _become(words: Sequence[str], policy: str, settings: dict[str, Any]) -> int:
    if os.name != "posix":
        # On Windows this process would end before the script's.
        return _wait(words, policy, settings)
    command, environment = _command(words, policy, settings)
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def _wait(words: Sequence[str], policy: str, settings: dict[str, Any]) -> int:
    command, environment = _command(words, policy, settings)

    def leave_to_script(*_: Any) -> None:
        # Ctrl-C reaches both processes; the script decides what it means.
        pass

    before = signal.signal(signal.SIGINT, leave_to_script)
    try:
        code = subprocess.Popen(command, env=environment).wait()
    finally:
        signal.signal(signal.SIGINT, before)
    # Shells report a program ended by a signal like this.
    return code if code >= 0 else 128 - code
