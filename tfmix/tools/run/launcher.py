"""Starts Python on a script so that it imports tfmix along with Keras.

It does not import tfmix, because that would import Keras, and the script may
still choose a backend.
"""

import json
import os
import pathlib
import shutil
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
    policy: str | None = None,
    against: str | None = None,
    repeat: int = 1,
    file: str | None = None,
    is_json: bool = False,
) -> int:
    """Runs a script as `python` would, and returns its exit code.

    Args:
        words: The words after `python`: `["train.py", "--epochs", "3"]`, or
            `["-m", "package.train"]`.
        policy: The policy for the training. `None` is the script's own or
            `"auto"`.
        against: The policy of a run to compare with, which comes first.
        repeat: How often both runs take turns.
        file: The file for the report as JSON.
        is_json: Whether to print JSON instead of a table.

    Returns:
        The exit code. On POSIX it returns only if an earlier run failed,
        because this process becomes the last one.
    """
    printed = {
        # The script may change its folder.
        "file": file and os.path.abspath(file),
        "is_json": is_json,
    }
    asked = (policy or "auto", policy is not None)
    if against is None:
        return _become(words, *asked, printed)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tfmix-run-"))
    runs = [(against, True), asked] * repeat
    files: list[str] = []
    for number, (name, is_asked) in enumerate(runs, 1):
        _announce(number, len(runs), name)
        # Both runs of a pair begin with one seed, and other pairs with others.
        settings: dict[str, Any] = {"seed": (number - 1) // 2}
        if number == 1:
            # It ends before its first step if the next one is in its policy.
            settings["then"] = asked
        elif number == 2:
            # It ends after that if its layers are those of the first one.
            settings["first"] = files[0]
        if number == len(runs):
            break
        files.append(str(folder / f"{number}.json"))
        settings |= {"file": files[-1], "is_quiet": True}
        code = _wait(words, name, is_asked, settings)
        is_silent = "error" in _read(files[-1])
        if is_silent and file is not None:
            shutil.copy(files[-1], file)
        if code or is_silent:
            why = f"ended with exit code {code}" if code else "has no report"
            print(
                f"tfmix run: this run {why}, so there are no more and no "
                "comparison.",
                file=sys.stderr,
            )
            shutil.rmtree(folder)
            return code or FAILED
    settings |= {**printed, "before": files}
    return _become(words, name, is_asked, settings)


def _announce(number: int, of: int, policy: str) -> None:
    print(f"tfmix run: {number} of {of}, {policy}", file=sys.stderr, flush=True)


def _read(file: str) -> dict[str, Any]:
    """Returns what a run wrote, {} for nothing."""
    path = pathlib.Path(file)
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _command(
    words: Sequence[str], policy: str, is_asked: bool, settings: dict[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Returns a command line and its environment."""
    paths = [str(_STARTUP), os.environ.get("PYTHONPATH", "")]
    # The first process of the run that uses Keras removes this file.
    handle, unused = tempfile.mkstemp(prefix="tfmix-run-")
    os.close(handle)
    settings = {**settings, "is_asked": is_asked, "unused": unused}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TFMIX_POLICY": policy,
        "TFMIX_RUN": json.dumps(settings),
    }
    if "seed" in settings:
        # The order of a set of words then is the same, too.
        environment.setdefault("PYTHONHASHSEED", str(settings["seed"]))
    return [sys.executable, *words], environment


def _become(
    words: Sequence[str], policy: str, is_asked: bool, settings: dict[str, Any]
) -> int:
    if os.name != "posix":
        # On Windows this process would end before the script's.
        return _wait(words, policy, is_asked, settings)
    command, environment = _command(words, policy, is_asked, settings)
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def _wait(
    words: Sequence[str], policy: str, is_asked: bool, settings: dict[str, Any]
) -> int:
    command, environment = _command(words, policy, is_asked, settings)

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
