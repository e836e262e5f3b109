"""Two real processes on one machine, one of which overflows."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests import helpers

if keras.backend.backend() != "tensorflow":
    pytest.skip("tf.distribute is TensorFlow's own", allow_module_level=True)

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 240


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(index, workers):
    config = {
        "cluster": {"worker": workers},
        "task": {"type": "worker", "index": index},
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.worker"],
        cwd=ROOT,
        env={**os.environ, "TF_CONFIG": json.dumps(config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process):
    out, err = process.communicate(timeout=SECONDS)
    lines = [line for line in out.splitlines() if line.startswith("RESULT")]
    assert lines, f"the worker ended without a result:\n{err[-3000:]}"
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.mark.slow
def test_a_nan_on_one_worker_is_skipped_by_both_and_nothing_hangs():
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    processes = [start(index, workers) for index in range(2)]
    try:
        one, two = map(result_of, processes)
    finally:
        for process in processes:
            process.kill()
    assert one["trained"] == two["trained"]
    for worker in (one, two):
        values = worker["trained"] + worker["statistics"]
        helpers.assert_all_finite(map(np.asarray, values))
    # Each of the two epochs contains the bad row once.
    assert one["skipped_steps"] == two["skipped_steps"] == 2
    assert one["loss_scale"] == two["loss_scale"] == 256.0
    assert np.isfinite(one["loss"] + two["loss"]).all()
    assert one["loss"][1] < one["loss"][0]
