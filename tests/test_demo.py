"""The demo: its data, its arithmetic, its verdict and a short real run."""

import dataclasses
import json
import sys

import keras
import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the demo's data come with scikit-learn")

from tfmix import demo

TENSORFLOW = keras.backend.backend() == "tensorflow"


def make_run(policy="float32", accuracy=0.99, **changes):
    run = demo.Run(
        policy=policy,
        seed=0,
        accuracy=accuracy,
        losses=(1.0, 0.5),
        loss_scale=1.0,
        skipped_steps=0,
        seconds=2.0,
        activation_bytes=2048,
        rows=6272,
    )
    return dataclasses.replace(run, **changes)


def report_of(*accuracies):
    runs = zip(demo.POLICIES, accuracies, strict=True)
    return demo.Report(tuple(make_run(p, a) for p, a in runs))


def test_the_images_as_scanned_come_first_and_keep_their_labels():
    data = demo.load()
    train_x, test_x, train_y, _ = demo.without_shifts(data)
    assert len(train_x) == len(train_y) == 1797 - len(test_x)
    assert train_x.tobytes() == data[0][: len(train_x)].tobytes()
    # Scans hold whole sixteenths; a shift by half a pixel makes halves of them.
    assert not (16 * train_x % 1).any()
    assert (16 * data[0][len(train_x) :] % 1).any()


def test_no_test_image_is_trained_on_and_every_digit_is_in_both_parts():
    train_x, test_x, train_y, test_y = demo.load()
    assert len(train_x) == len(train_y) == 5 * (1797 - len(test_x))
    known = {image.tobytes() for image in train_x}
    shared = sum(image.tobytes() in known for image in test_x)
    assert shared == 0
    # Stratified: the shares of the ten digits agree to one image in 540.
    parts = [np.bincount(y) / len(y) for y in (train_y, test_y)]
    assert np.abs(parts[0] - parts[1]).max() <= 1 / len(test_y)


def test_half_shifts_move_the_mass_by_half_a_pixel_each_way():
    image = np.zeros((1, 8, 8, 1), "float32")
    image[0, 3, 4] = 1.0
    moved = demo.with_half_shifts(image)
    rows, columns = np.indices((8, 8))
    centres = [
        (
            float((rows * one[..., 0]).sum()),
            float((columns * one[..., 0]).sum()),
        )
        for one in moved
    ]
    assert centres == [(3, 4), (3.5, 4), (2.5, 4), (3, 4.5), (3, 3.5)]


def test_half_shifts_stay_in_step_with_the_labels():
    images = np.arange(3, dtype="float32").reshape(3, 1, 1, 1)
    images = np.broadcast_to(images, (3, 8, 8, 1))
    inner = demo.with_half_shifts(images)[:, 4, 4, 0]
    assert inner.tolist() == np.tile([0.0, 1.0, 2.0], 5).tolist()


@pytest.mark.parametrize(
    ("accuracies", "healthy"),
    [
        ((0.99, 0.99, 0.99), True),
        ((0.98, 0.984, 0.98), True),
        ((0.979, 0.98, 0.98), False),
        ((0.99, 0.982, 0.99), False),
        ((0.982, 0.985, 0.99), False),
    ],
)
def test_the_verdict_asks_for_accuracy_and_for_agreement(accuracies, healthy):
    assert report_of(*accuracies).healthy is healthy


@pytest.mark.parametrize(
    ("accuracies", "healthy"),
    [
        ((0.96, 0.96), True),
        ((0.95, 0.9599), True),
        ((0.95, 0.961), False),
        ((0.949, 0.95), False),
    ],
)
def test_fewer_images_have_a_goal_of_their_own(accuracies, healthy):
    runs = [make_run("float32", 0.99), make_run("mixed_float16", 0.99)]
    pairs = zip(("float32", "mixed_bfloat16"), accuracies, strict=True)
    fewer = [make_run(policy, mean, rows=1216) for policy, mean in pairs]
    assert demo.Report((*runs, *fewer)).healthy is healthy


def fitted(pace, seconds, monkeypatch):
    """Runs a callback as `fit` does, on a clock of its own."""
    clock = [0.0]
    monkeypatch.setattr(demo.time, "perf_counter", lambda: clock[0])
    model = keras.Sequential()
    model.stop_training = False
    pace.set_model(model)
    for epoch, length in enumerate(seconds):
        pace.on_epoch_begin(epoch)
        clock[0] += length
        pace.on_epoch_end(epoch)
        if model.stop_training:
            return epoch + 1
    return len(seconds)


@pytest.mark.parametrize(
    ("seconds", "epochs"),
    [
        ((9.0, 2.5, 2.5, 2.5), 3),
        ((9.0, 2.5, 2.0, 2.5), 4),
        ((9.0, 2.0, 2.5, 2.5), 4),
        ((9.0, 2.5), 2),
        ((9.0,), 1),
    ],
)
def test_a_training_ends_after_two_epochs_beyond_the_limit(
    seconds, epochs, monkeypatch
):
    pace = demo.Pace(limit=2.0)
    assert fitted(pace, seconds, monkeypatch) == epochs
    assert pace.too_slow is (epochs == 3)
    assert pace.seconds == min(seconds[1:epochs], default=np.inf)


@pytest.fixture
def trained(monkeypatch):
    """Lists what would be trained, where bfloat16 takes 2.5 times as long."""
    seen = []

    def train(policy, seed, data, epochs, callbacks):
        tick, pace = callbacks
        pace.seconds = 2.5 if policy == "mixed_bfloat16" else 1.0
        pace.too_slow = pace.seconds > pace.limit
        for epoch in range(2 if pace.too_slow else epochs):
            tick.on_epoch_end(epoch, {"loss": 1.0})
        seen.append((policy, seed, len(data[0])))
        return make_run(policy, seed=seed, rows=len(data[0]))

    monkeypatch.setattr(demo, "train", train)
    return seen


def test_an_emulated_policy_trains_on_fewer_images_beside_float32(
    trained, capsys
):
    report = demo.run(out=None, seeds=2)
    all_of_them, fewer = 6285, 1257
    assert trained == [
        *(("float32", seed, all_of_them) for seed in (0, 1)),
        *(("mixed_float16", seed, all_of_them) for seed in (0, 1)),
        # Ended early, and not in the report.
        ("mixed_bfloat16", 0, all_of_them),
        *(("float32", seed, fewer) for seed in (0, 1)),
        *(("mixed_bfloat16", seed, fewer) for seed in (0, 1)),
    ]
    assert list(report.groups()) == [
        (all_of_them, "float32"),
        (all_of_them, "mixed_float16"),
        (fewer, "float32"),
        (fewer, "mixed_bfloat16"),
    ]
    out = capsys.readouterr().out
    (line,) = [one for one in out.splitlines() if "emulates" in one]
    assert "bfloat16 (2.5 times as slow)" in line
    assert len(line) <= 80
    assert "100%" in out


def test_nothing_is_said_to_be_emulated_by_an_accelerator(
    trained, monkeypatch, capsys
):
    (cpu,) = {device.kind: device for device in demo.devices()}.values()
    gpu = dataclasses.replace(cpu, kind="GPU")
    monkeypatch.setattr(demo, "devices", lambda: [gpu, cpu])
    report = demo.run(out=None, seeds=1)
    assert [policy for _, policy in report.groups()] == [*demo.POLICIES]
    assert "emulates" not in capsys.readouterr().out


def test_a_quiet_demo_prints_nothing(trained, capsys):
    demo.run(out=None, seeds=1, quiet=True)
    assert capsys.readouterr().out == ""


def test_the_table_says_whether_the_goal_was_reached(capsys):
    from rich import console

    for accuracies, word in (((0.99,) * 3, "reached"), ((0.5,) * 3, "MISSED")):
        console.Console(width=80).print(report_of(*accuracies).table())
        out = capsys.readouterr().out
        assert word in out
        assert all(policy in out for policy in demo.POLICIES)
        assert "6,272" in out


def test_the_report_is_plain_json():
    data = json.loads(json.dumps(report_of(0.99, 0.98, 0.99).to_dict()))
    assert data["runs"][1]["accuracy"] == 0.98
    assert data["healthy"] is False


def test_the_plot_is_left_out_where_matplotlib_is_missing(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert demo.plot(report_of(0.99, 0.99, 0.99), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_the_plot_is_a_png_file(tmp_path):
    pytest.importorskip("matplotlib")
    path = demo.plot(report_of(0.99, 0.99, 0.99), tmp_path / "new")
    with open(path, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


# JAX compiles for ten seconds each time; the slow test below runs all three.
TRAINED = demo.POLICIES if TENSORFLOW else ("mixed_float16",)


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
    assert run.loss_scale == (2.0**15 if policy == "mixed_float16" else 1.0)


@pytest.mark.slow
def test_the_demo_reaches_its_goal(tmp_path):
    report = demo.run(out=str(tmp_path), quiet=True)
    assert report.healthy, report.to_dict()
    assert {run.policy for run in report.runs} == {*demo.POLICIES}
    assert {len(runs) for runs in report.groups().values()} == {demo.SEEDS}
