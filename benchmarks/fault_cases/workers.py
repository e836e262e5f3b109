"""The fault that needs two worker processes (`tf.distribute`).

python -m benchmarks.fault_cases.workers SYSTEM

is one of two workers that train together, by TF_CONFIG in the environment.
Worker 1 meets a NaN.
"""

import json
import socket
import subprocess
import sys
from typing import Any

from benchmarks import answers
from benchmarks.fault_cases.record import TENSORFLOW_ONLY, Outcome, fault

# A worker needs seconds to import TensorFlow and to find the other worker. A
# step takes milliseconds.
_SECONDS = 120
_STEPS, _BAD_STEP = 3, 1


def _start(system: Any) -> list[subprocess.Popen[str]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    workers = ["{}:{}".format(*each.getsockname()) for each in sockets]
    for each in sockets:
        each.close()
    tasks = [{"type": "worker", "index": index} for index in range(2)]
    configs = [{"cluster": {"worker": workers}, "task": t} for t in tasks]
    return [
        answers.started(
            "benchmarks.fault_cases.workers",
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
            worker.communicate()
    ends = [end for text in said for end in answers.read(text.splitlines())]
    if len(ends) != 2:
        return Outcome(False, f"a worker dies, last words: {said}")
    (first, scale, skipped), second = ends[0], ends[1][0]
    same = first == second
    return Outcome(
        same and (scale, skipped) == (512.0, 1),
        f"{'same' if same else 'different'} weights on both workers, "
        f"{skipped} of {_STEPS} steps skipped, scale {scale:g} (right: 512)",
    )


def main(system_name: str) -> None:
    """Runs three steps, the second with NaN on worker 1 only."""
    import keras
    import numpy as np
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # The strategy must be created before other TensorFlow code runs.
    from benchmarks.fault_cases import systems, words

    system = systems.by_name(system_name)
    with strategy.scope():
        weight = system.variable([1.0, 2.0], "weight")
        optimizer = system.wrap(keras.optimizers.SGD(0.1), initial_scale=1024.0)
        optimizer.build([weight])
    bad_worker = strategy.cluster_resolver.task_id == 1

    @tf.function
    def step(gradient: Any) -> None:
        strategy.run(
            lambda g: optimizer.apply([optimizer.scale_loss(g)], [weight]),
            args=(gradient,),
        )

    for number in range(_STEPS):
        bad = bad_worker and number == _BAD_STEP
        step(tf.constant([np.nan if bad else 1.0, 1.0]))
    skipped = words.skipped(optimizer, _STEPS)
    value = words.to_numpy(weight).tolist()
    answers.answer([value, words.scale(optimizer), skipped])


if __name__ == "__main__":
    main(sys.argv[1])
