"""The fault that needs two worker processes (`tf.distribute`)."""

import json
import socket
from typing import Any

from benchmarks.fault_cases import processes, two_workers
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Outcome, fault

# A worker needs seconds to import TensorFlow and to find the other worker. A
# step takes milliseconds.
_START_SECONDS = 120
_STEP_SECONDS = 40


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _start(system: Any) -> list[processes.Child]:
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(2)]
    return [
        processes.Child(
            two_workers.__name__,
            [system.name],
            {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": addresses},
                        "task": {"type": "worker", "index": index},
                    }
                )
            },
        )
        for index in range(2)
    ]


def _last_lines(workers: list[processes.Child]) -> list[str]:
    """Reads each worker to its end, step by step, and returns its last line.

    Raises:
        TimeoutError: If a worker prints nothing for too long.
    """
    last = []
    for worker in workers:
        line = worker.line(_START_SECONDS)
        lines = [line]
        while line is not None:
            line = worker.line(_STEP_SECONDS)
            lines.append(line)
        last.append(lines[-2] if len(lines) > 1 else "")
    return last


@fault(TENSORFLOW_ONLY, seconds=300)
def nan_in_one_worker(system: Any) -> Outcome:
    """NaN on worker 1 of 2 (MultiWorkerMirroredStrategy), step 2 of 3."""
    workers = _start(system)
    try:
        last = _last_lines(workers)
    except TimeoutError:
        return Outcome(False, f"hangs (killed after {_STEP_SECONDS} s)")
    finally:
        for worker in workers:
            worker.kill()
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


FAULTS = (nan_in_one_worker,)
