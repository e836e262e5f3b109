"""Processes that answer: one request after the other, or once.

Only the standard library is used here, since a worker may run under another
Python, whose environment has not what ours has.
"""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).parents[1]
# What a library prints while it is imported is no answer.
_MARK = "answer: "


class Worker:
    """A process that runs one of our modules and answers requests.

    Use as a context manager: the process ends with the block.

    Args:
        module: String, as `python -m` takes it; the module calls `serve`.
        arguments: Strings.
        python: The Python to run it with. Defaults to this one.
        environment: Variables on top of this process's own.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = " ".join([python, "-m", module, *arguments])
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
        )

    def ask(self, **request: Any) -> Any:
        """Sends a request and waits for its answer.

        Raises:
            RuntimeError: If the process ends instead, or its answer is an
                error.
        """
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer = json.loads(line.removeprefix(_MARK))
                if "error" in answer:
                    raise RuntimeError(f"{self._name}: {answer['error']}")
                return answer["value"]
        code = self._process.wait()
        raise RuntimeError(f"{self._name} ended with exit code {code}.")

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def answer_of(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Any:
    """Runs one of our modules in a process of its own; returns its answer."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=_ROOT,
        env={**os.environ, **(environment or {})},
    )
    lines = done.stdout.splitlines()
    (line,) = (each for each in lines if each.startswith(_MARK))
    return json.loads(line.removeprefix(_MARK))["value"]


def answer(value: Any) -> None:
    """Answers the process that started this one by `answer_of`."""
    print(_MARK + json.dumps({"value": value}), flush=True)


def serve(answer: Callable[..., Any]) -> None:
    """Answers requests until there are no more.

    Args:
        answer: Called with the request's values by name; returns what JSON
            can hold. An exception is sent back as its text.
    """
    for line in sys.stdin:
        try:
            reply = {"value": answer(**json.loads(line))}
        except Exception as error:
            # The asking process decides; this one can go on.
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(_MARK + json.dumps(reply), flush=True)
