"""The script for TPUs on eight pretended devices."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the example's data come with it")

from tests import helpers
from tests.tree import ROOT

SCRIPT = ROOT / "examples" / "tpu.py"


def started(*arguments, **environment):
    """Runs the script as a reader does."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--quiet", "--out=", *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.slow
@helpers.requires_backend("tensorflow")  # It starts the other one by itself.
@pytest.mark.parametrize("devices", [1, 8])
def test_the_script_runs_unchanged_on_one_device_and_on_eight(devices):
    flag = f"--xla_force_host_platform_device_count={devices}"
    done = started(XLA_FLAGS=flag, KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on {devices} device(s)" in done.stdout
    assert "FALSE" not in done.stdout


@helpers.requires_backend("jax")  # Importing it asks Keras for JAX.
def test_every_batch_can_be_shared_and_every_size_is_a_tile():
    from tfmix.examples import tpu

    train_x, test_x, train_y, test_y = tpu.load()
    assert train_x.shape[1:] == test_x.shape[1:] == (tpu.TILE,)
    assert len(train_x) == len(train_y) > 0
    assert len(train_x) % tpu.BATCH_SIZE == tpu.BATCH_SIZE % (8 * tpu.TILE) == 0
    assert not np.any(train_x[:, 64:])
    assert len(test_x) == len(test_y) == 540


@helpers.requires_backend("jax")
def test_a_run_is_on_all_devices():
    import jax

    from tfmix.examples import tpu

    parallel = keras.distribution.DataParallel()
    keras.distribution.set_distribution(parallel)
    try:
        run = tpu.train("mixed_bfloat16", 0, 4, lambda loss: None)
    finally:
        keras.distribution.set_distribution(None)
    assert run.columns == {
        "loss scale": "1",
        "computes in": "bfloat16",
        "devices": str(len(jax.devices())),
    }
    assert run.score > 0.3


@pytest.mark.slow
@helpers.requires_backend("tensorflow")
def test_the_other_backend_is_refused_with_the_way_out():
    done = started(KERAS_BACKEND="tensorflow")
    assert done.returncode == 1
    assert "KERAS_BACKEND=jax" in done.stderr
