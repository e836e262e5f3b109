"""The demo: its data, its arithmetic, its verdict and a short real run."""

import dataclasses
import re
import sys

import keras
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the demo's data come with scikit-learn")

from tfmix.tools import demo

TENSORFLOW = keras.backend.backend() == "tensorflow"


RUN = demo.Run(
    policy="float32",
    seed=0,
    accuracy=0.99,
    losses=(1.0,) * demo.EPOCHS,
    loss_scale=1.0,
    skipped_steps=0,
    seconds=2.0,
    activation_bytes=2048,
    rows=6272,
)


def report_of(*accuracies, rows=6272):
    pairs = zip(demo.POLICIES, accuracies, strict=True)
    changes = ({"policy": p, "accuracy": a, "rows": rows} for p, a in pairs)
    return demo.Report(tuple(dataclasses.replace(RUN, **c) for c in changes))


def test_the_images_as_scanned_come_first_and_keep_their_labels():
    data = demo.load()
    train_x, test_x, train_y, test_y = demo.first_copies(data, 1)
    assert len(train_x) == len(train_y) == demo.SCANNED == 1797 - len(test_x)
    assert train_x.tobytes() == data[0][: len(train_x)].tobytes()
    # Scans hold whole sixteenths; a shift by half a pixel makes halves of them.
    assert not (16 * train_x % 1).any()
    assert (16 * data[0][len(train_x) :] % 1).any()
    train_x, _, train_y, _ = data
    assert len(train_x) == len(train_y) == demo.COPIES * demo.SCANNED
    # No test image is trained on.
    known = {image.tobytes() for image in train_x}
    assert not [image for image in test_x if image.tobytes() in known]
    # Stratified: the shares of the ten digits agree to one image in 540.
    parts = [np.bincount(y) / len(y) for y in (train_y, test_y)]
    assert np.abs(parts[0] - parts[1]).max() <= 1 / len(test_y)


def test_half_shifts_move_the_mass_by_half_a_pixel_each_way():
    image = np.zeros((1, 8, 8, 1), "float32")
    image[0, 3, 4] = 1.0
    moved = demo.with_half_shifts(image)[..., 0]
    centres = np.einsum("nij,kij->nk", moved, np.indices((8, 8))).tolist()
    expected = [[3, 4], [3.5, 4], [2.5, 4], [3, 4.5], [3, 3.5]]
    assert centres == expected


@pytest.mark.parametrize(
    ("rows", "accuracies", "healthy"),
    [
        (6272, (0.99, 0.99, 0.99), True),
        (6272, (0.98, 0.984, 0.98), True),
        (6272, (0.979, 0.98, 0.98), False),
        (6272, (0.99, 0.982, 0.99), False),
        (6272, (0.982, 0.985, 0.99), False),
        # Fewer images have a goal of their own.
        (1216, (0.96, 0.96, 0.955), True),
        (1216, (0.95, 0.9599, 0.95), True),
        (1216, (0.95, 0.961, 0.95), False),
        (1216, (0.949, 0.95, 0.95), False),
    ],
)
def test_the_verdict_asks_for_accuracy_and_agreement(rows, accuracies, healthy):
    assert report_of(*accuracies, rows=rows).healthy is healthy


def test_the_pace_is_that_of_the_fastest_batch_after_compiling(monkeypatch):
    clock, pace = [0.0], demo.Pace()
    monkeypatch.setattr(demo.time, "perf_counter", lambda: clock[0])
    for batch, seconds in enumerate((9.0, 0.1, 0.1, 2.5, 2.0, 3.0)):
        pace.on_train_batch_begin(batch)
        clock[0] += seconds
        pace.on_train_batch_end(batch)
    assert pace.seconds == 2.0


@pytest.fixture
def trained(monkeypatch):
    """Lists what would be trained, where bfloat16 is slow."""
    seen = []

    def train(policy, seed, data, epochs, callbacks):
        (tick,) = callbacks
        for epoch in range(epochs):
            tick.on_epoch_end(epoch, {"loss": 1.0})
        seen.append((policy, seed, len(data[0])))
        known = {"policy": policy, "seed": seed, "rows": len(data[0])}
        return dataclasses.replace(RUN, **known)

    monkeypatch.setattr(demo, "train", train)
    return seen


@pytest.mark.parametrize(
    ("seconds", "copies"), [(0.010, 5), (0.040, 2), (0.060, 1), (0.400, 1)]
)
def test_all_policies_train_on_as_many_images_as_there_is_time_for(
    seconds, copies, trained, monkeypatch, capsys
):
    # Only float16 is timed: where formats are emulated it is the slowest.
    monkeypatch.setattr(
        demo,
        "seconds_of_a_batch",
        lambda policy, data: {"mixed_float16": seconds}[policy],
    )
    report = demo.run(out=None)
    planned = [(p, seed) for p in demo.POLICIES for seed in (0, 1)]
    # Keras's float16 has one seed.
    planned.append((demo.KERAS, 0))
    assert trained == [(*run, copies * demo.SCANNED) for run in planned]
    steps = copies * demo.SCANNED / demo.BATCH_SIZE * demo.EPOCHS
    assert steps * len(planned) * seconds <= demo.BUDGET or copies == 1
    assert report.goal() == (demo.GOAL if copies == 5 else demo.GOAL_FOR_FEWER)
    out = capsys.readouterr().out
    # It prints as it goes, before the first training too.
    assert out.splitlines()[0].startswith("timing a few batches in float16")
    assert f"mixed_float16: {1000 * seconds:.1f} ms a batch" in out
    assert ("less to wait for" in out) is (copies < 5)
    assert "100%" in out
    demo.run(out=None, seeds=1, quiet=True)
    assert capsys.readouterr().out == ""


def test_the_table_says_whether_the_goal_was_reached(capsys):
    from rich import console

    for accuracies, word in (((0.99,) * 3, "reached"), ((0.5,) * 3, "MISSED")):
        console.Console(width=80).print(report_of(*accuracies))
        out = capsys.readouterr().out
        assert word in out
        assert all(policy in out for policy in demo.POLICIES)
        assert "6,272" in out
        assert "emulates" not in out


def test_keras_is_shown_beside_and_not_judged():
    bad = dataclasses.replace(
        RUN, policy=demo.KERAS, accuracy=0.1, skipped_steps=None
    )
    report = demo.Report((*report_of(0.99, 0.99, 0.99).runs, bad))
    assert report.healthy
    (row,) = [line for line in str(report).splitlines() if demo.KERAS in line]
    assert "10.00 %" in row
    assert re.search(r" - +2\.0 ", row)


def test_a_short_run_on_a_cpu_says_what_it_cannot_show():
    run = dataclasses.replace(RUN, losses=(1.0,), accuracy=0.5, on_cpu=True)
    report = demo.Report((run,))
    assert report.healthy
    shown = " ".join(str(report).split())
    assert f"judged, as it takes {demo.EPOCHS} epochs" in shown
    assert "A CPU emulates float16" in str(report)


def test_the_plot_is_a_png_file_or_left_out(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = demo.plot(report_of(0.99, 0.99, 0.99), tmp_path / "new")
    with open(path, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert demo.plot(report_of(0.99, 0.99, 0.99), tmp_path / "none") is None
    assert not (tmp_path / "none").exists()


# JAX compiles for ten seconds each time; the slow test below runs all three.
TRAINED = (demo.KERAS, *demo.POLICIES) if TENSORFLOW else ("mixed_float16",)


@pytest.mark.costly
@pytest.mark.parametrize("policy", TRAINED)
def test_one_epoch_learns_under_every_policy(policy):
    train_x, test_x, train_y, test_y = demo.load()
    # Whole batches: a smaller last one would be compiled for, too.
    kept = 19 * demo.BATCH_SIZE
    data = (train_x[:kept], test_x, train_y[:kept], test_y)
    run = demo.train(policy, 0, data, 1, [])
    # Guessing names a tenth; one pass over a fifth of the data, far more.
    assert run.accuracy > 0.4
    assert run.seconds > 0
    assert len(run.losses) == 1
    # The network's outputs by hand, 64 images each: the convolutions and
    # what follows them, then the head, whose last layer is float32.
    hidden = 64 * (8 * 8 * (16 + 32) + 3 * 4 * 4 * 32 + 64 + 64 + 10)
    width = 4 if policy == "float32" else 2
    assert run.activation_bytes == hidden * width + 64 * 10 * 4
    assert run.loss_scale == (2.0**15 if "mixed_float16" in policy else 1.0)
    # Nothing of ours is left in Keras's row, and nothing of it in others.
    assert (run.skipped_steps is None) is (policy == demo.KERAS)
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.costly
def test_a_batch_is_timed_under_a_policy():
    assert 0 < demo.seconds_of_a_batch("mixed_bfloat16", demo.load()) < 10


@pytest.mark.slow
def test_the_demo_reaches_its_goal(tmp_path):
    report = demo.run(out=str(tmp_path), quiet=True)
    assert report.healthy, report.to_dict()
    by_policy = report.by_policy()
    assert len(by_policy.pop(demo.KERAS)) == 1
    assert {*by_policy} == {*demo.POLICIES}
    assert {len(runs) for runs in by_policy.values()} == {demo.SEEDS}
