"""Python in processes of its own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 600


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


def results(*words, workers=0, cwd=ROOT, **variables):
    """Runs Python in one process, or in workers that train together.

    Args:
        *words: The arguments.
        workers: The number of processes of a cluster; 0 means one process
            without a cluster.
        cwd: The folder.
        **variables: Environment variables besides those of this process.

    Returns:
        What each process printed as JSON, in a line that begins with `RESULT`.
    """
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables, **cluster},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cluster in _clusters(workers)
    ]
    try:
        ended = [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    return [_result(words, *each) for each in ended]


def _result(words, out, err):
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"{words} ended without a result:\n{err[-3000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def _clusters(workers):
    # All ports are bound at the same time, so that no two are equal.
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    tasks = [{"type": "worker", "index": index} for index in range(workers)]
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
        for task in tasks
    ] or [{}]
