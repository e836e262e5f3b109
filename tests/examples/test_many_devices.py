"""One bad replica of many: all skip together, and the network learns."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the example's data come with it")

from tests import helpers
from tfmix.examples import many_devices


@pytest.mark.slow
@helpers.requires_backend("tensorflow")  # It starts the other one by itself.
def test_all_replicas_skip_with_the_bad_one_and_survive():
    outcome = many_devices.run(quiet=True)
    assert outcome.healthy, [outcome.claims, outcome.runs]
    assert len(outcome.runs) == 3 * 2 * many_devices.SEEDS
    for run in outcome.runs:
        assert run.columns["steps"] > run.columns["skipped\nby all"]
        if run.twin != run.variant:
            assert run.columns["scale"] == f"2^{15 - many_devices.EPOCHS}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("finite", False),
        ("skipped_steps", 0),
        ("skipped_steps", many_devices.EPOCHS + 1),
        ("accuracy", 0.1),
        ("accuracy", float("nan")),
    ],
)
def test_a_run_that_was_hurt_is_told_from_one_that_survived(key, value):
    sound = {
        "finite": True,
        "skipped_steps": many_devices.EPOCHS,
        "accuracy": 1.0,
    }
    assert many_devices.survived(sound)
    assert not many_devices.survived({**sound, key: value})


@pytest.mark.parametrize("key", ["trained", "skipped_steps", "loss_scale"])
def test_workers_that_end_apart_are_found(key):
    one = {"trained": "a", "skipped_steps": 6, "loss_scale": 2.0, "finite": 1}
    assert many_devices.same("part", [[one], [dict(one)]]) == [one]
    with pytest.raises(RuntimeError, match="'part' differ"):
        many_devices.same("part", [[one], [{**one, key: 0}]])


def test_a_process_that_fails_is_reported_with_what_it_said(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="'jax' ended without a result"):
        many_devices.run(("jax",), 1, quiet=True)


def test_only_one_row_is_bad_and_every_batch_is_whole():
    x, _, y, _ = many_devices.load()
    bad = ~np.isfinite(x).all(axis=1)
    assert bad.nonzero()[0].tolist() == [many_devices.BAD_ROW]
    assert len(x) == len(y)
    assert len(x) % many_devices.BATCH_SIZE == 0
