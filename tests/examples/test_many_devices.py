"""One bad replica of many: all skip together, and the network learns."""

import pytest

from examples import many_devices
from tests import helpers


@pytest.mark.slow
@helpers.requires_backend("tensorflow")  # It starts the other one by itself.
@pytest.mark.parametrize("part", many_devices.PARTS)
def test_all_replicas_skip_with_the_bad_one_and_survive(part):
    result = many_devices.run((part,))[part]
    assert many_devices.survived(result), result
    assert result["loss_scale"] == 2.0**15 / 2**many_devices.EPOCHS
    assert result["steps"] > result["skipped_steps"]


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
def test_a_part_that_was_hurt_is_told_from_one_that_survived(key, value):
    sound = {
        "finite": True,
        "skipped_steps": many_devices.EPOCHS,
        "accuracy": 1.0,
    }
    assert many_devices.survived(sound)
    assert not many_devices.survived({**sound, key: value})


def test_a_process_that_fails_is_reported_with_what_it_said(monkeypatch):
    monkeypatch.setattr(many_devices.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="'jax' ended without a result"):
        many_devices.run(("jax",))


def test_only_one_row_is_bad_and_every_batch_is_whole():
    x, _, y, _ = many_devices.load()
    bad = ~many_devices.np.isfinite(x).all(axis=1)
    assert bad.nonzero()[0].tolist() == [many_devices.BAD_ROW]
    assert len(x) == len(y)
    assert len(x) % many_devices.BATCH_SIZE == 0
