"""The fault that needs two worker processes (`tf.distribute`)."""

import json
import socket
import subprocess
from typing import Any

from benchmarks import answers
from benchmarks.fault_cases import two_workers
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Outcome, fault

# A worker needs seconds to import TensorFlow and to find the other worker. A
# step takes milliseconds.
_SECONDS = 120


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _start(system: Any) -> list[subprocess.Popen[str]]:
    workers = [f"127.0.0.1:{port}" for port in _free_ports(2)]
    tasks = [{"type": "worker", "index": index} for index in range(2)]
    configs = [{"cluster": {"worker": workers}, "task": t} for t in tasks]
    return [
        answers.started(
            two_workers.__name__,
            system.name,
            environment={"TF_CONFIG": json.dumps(config)},
        )
        for config in configs
    ]


@fault(TENSORFLOW_ONLY)
def nan_in_one_worker(system: Any) -> Outcome:
    """NaN on worker 1 of 2 (MultiWorkerMirroredStrategy), step 2 of 3."""
    workers = _start(system)
    try:
        said = [each.communicate(timeout=_SECONDS)[0] for each in workers]
    except subprocess.TimeoutExpired:
        return Outcome(False, f"hangs (killed after {_SECONDS} s)")
    finally:
        for worker in workers:
            worker.kill()
    last = [(text.splitlines() or [""])[-1] for text in said]
    if not all(line.startswith("{") for line in last):
        return Outcome(False, f"a worker dies, last words: {last}")
    first, second = (json.loads(line) for line in last)
    same = first == second
    right = same and first["scale"] == 512.0 and first["skipped"] == 1
    return Outcome(
        right,
        f"{'same' if same else 'different'} weights on both workers, "
        f"{first['skipped']} of {two_workers.STEPS} steps skipped, scale "
        f"{first['scale']:g} (right: 512)",
    )
