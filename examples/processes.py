"""Processes that an example starts: alone, or as workers of one cluster."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

_TIMEOUT = 400  # seconds
_RESULT = "RESULT "


def report(result: Any) -> None:
    """Passes a process's result, plain JSON values, to who started it."""
    print(_RESULT + json.dumps(result), flush=True)


def run(
    name: str, words: list[str], environment: dict[str, str], workers: int = 0
) -> list[Any]:
    """Runs a script in one process, or in one for each worker.

    Args:
        name: Named when something goes wrong.
        words: The script and its flags.
        environment: Variables to set beside those of this process.
        workers: Workers of a cluster of TensorFlow's on this machine.
            Defaults to `0`: one process that knows of no cluster.

    Returns:
        What each process reported.

    Raises:
        RuntimeError: If one ends without a report.
    """
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **environment,
                **cluster,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cluster in _clusters(workers)
    ]
    try:
        ended = [process.communicate(timeout=_TIMEOUT) for process in started]
    finally:
        for process in started:
            process.kill()
    results = []
    for out, err in ended:
        lines = [line for line in out.splitlines() if line.startswith(_RESULT)]
        if not lines:
            raise RuntimeError(f"{name!r} ended without a result:\n{err}")
        results.append(json.loads(lines[0].removeprefix(_RESULT)))
    return results


def _clusters(workers: int) -> list[dict[str, str]]:
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(workers)]
    clusters = [
        {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        for index in range(workers)
    ]
    return [{"TF_CONFIG": json.dumps(one)} for one in clusters] or [{}]


def _free_ports(count: int) -> list[int]:
    # All are bound at once, so that no two are the same.
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
