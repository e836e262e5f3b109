"""Two real processes on one machine, one of which overflows."""

import keras
import numpy as np
import pytest

from tests import helpers, processes

if keras.backend.backend() != "tensorflow":
    pytest.skip("tf.distribute is TensorFlow's own", allow_module_level=True)


@pytest.mark.slow
def test_a_nan_on_one_worker_is_skipped_by_both_and_nothing_hangs():
    one, two = processes.results("-m", "tests.worker", workers=2)
    assert one["trained"] == two["trained"]
    for worker in (one, two):
        values = worker["trained"] + worker["statistics"]
        helpers.assert_all_finite(map(np.asarray, values))
    # Each of the two epochs contains the bad row once.
    assert one["skipped_steps"] == two["skipped_steps"] == 2
    assert one["loss_scale"] == two["loss_scale"] == 256.0
    assert np.isfinite(one["loss"] + two["loss"]).all()
    assert one["loss"][1] < one["loss"][0]
