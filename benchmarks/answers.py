"""Runs our modules in separate processes, which return answers."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_ROOT = pathlib.Path(__file__).parents[1]
# Only lines with this mark are answers. Libraries print other lines.
_MARK = "answer: "


def started(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts one of our modules in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={**os.environ, **(environment or {})},
    )


def answers_of(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Runs one of our modules in a separate process; yields its answers.

    Raises:
        RuntimeError: If the process fails; earlier answers come first.
    """
    process = started(module, *arguments, environment=environment)
    with process:
        yield from read(process.stdout)
    if process.returncode:
        name = " ".join(["python", "-m", module, *arguments])
        raise RuntimeError(f"{name} ended with exit code {process.returncode}.")


def read(lines: Iterable[str]) -> Iterator[Any]:
    """Yields the answers among the lines that a process prints."""
    for line in lines:
        if line.startswith(_MARK):
            yield json.loads(line.removeprefix(_MARK))


def answer_of(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Any:
    """Runs a module that answers once; returns its answer."""
    (value,) = answers_of(module, *arguments, environment=environment)
    return value


def answer(value: Any) -> None:
    """Answers the process that started this one."""
    print(_MARK + json.dumps(value), flush=True)
