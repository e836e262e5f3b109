"""The demo: its data, its arithmetic, its verdict and a short real run."""

import dataclasses
import re

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
    skipped_steps=0,
    seconds=2.0,
    activation_bytes=2048,
)


def report_of(*accuracies, epochs=demo.EPOCHS, on_cpu=False):
    pairs = zip(demo.POLICIES, accuracies, strict=True)
    runs = (dataclasses.replace(RUN, policy=p, accuracy=a) for p, a in pairs)
    return demo.Report(tuple(runs), epochs, on_cpu)


def test_no_test_image_is_trained_on():
    train_x, test_x, train_y, test_y = demo.load()
    assert len(train_x) == len(train_y) == 1797 - len(test_x)
    known = {image.tobytes() for image in train_x}
    assert not [image for image in test_x if image.tobytes() in known]
    # Stratified: the shares of the ten digits agree to one image in 540.
    parts = [np.bincount(y) / len(y) for y in (train_y, test_y)]
    assert np.abs(parts[0] - parts[1]).max() <= 1 / len(test_y)


@pytest.mark.parametrize(
    ("accuracies", "healthy"),
    [
        ((0.99, 0.99, 0.99), True),
        ((0.96, 0.97, 0.96), True),
        ((0.959, 0.96, 0.96), False),
        ((0.99, 0.974, 0.99), False),
        ((0.97, 0.98, 0.99), False),
    ],
)
def test_the_verdict_asks_for_accuracy_and_agreement(accuracies, healthy):
    assert report_of(*accuracies).healthy is healthy


def test_keras_is_shown_beside_and_not_judged():
    bad = dataclasses.replace(
        RUN, policy=demo.KERAS, accuracy=0.1, skipped_steps=None
    )
    runs = (*report_of(0.99, 0.99, 0.99).runs, bad)
    report = demo.Report(runs, demo.EPOCHS, False)
    assert report.healthy
    (row,) = [line for line in str(report).splitlines() if demo.KERAS in line]
    assert "10.00 %" in row
    assert re.search(r" - +2\.0 ", row)


def test_a_short_run_on_a_cpu_says_what_it_cannot_show():
    report = report_of(0.5, 0.5, 0.5, epochs=1, on_cpu=True)
    assert report.healthy
    shown = " ".join(str(report).split())
    assert f"judged, as it takes {demo.EPOCHS} epochs" in shown
    assert "A CPU emulates float16" in str(report)


# JAX compiles for ten seconds each time; the slow test below runs all three.
TRAINED = (demo.KERAS, *demo.POLICIES) if TENSORFLOW else ("mixed_float16",)


@pytest.mark.costly
@pytest.mark.parametrize("policy", TRAINED)
def test_one_epoch_learns_under_every_policy(policy):
    run = demo.train(policy, 0, demo.load(), 1)
    # Guessing names a tenth; one pass over the data, far more.
    assert run.accuracy > 0.4
    assert run.seconds > 0
    # The network's outputs by hand, 64 images each: the convolutions and
    # what follows them, then the head, whose last layer is float32.
    hidden = 64 * (8 * 8 * (16 + 32) + 3 * 4 * 4 * 32 + 64 + 64 + 10)
    width = 4 if policy == "float32" else 2
    assert run.activation_bytes == hidden * width + 64 * 10 * 4
    # Nothing of ours is left in Keras's row, and nothing of it in others.
    assert (run.skipped_steps is not None) is policy.startswith("mixed_")
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.slow
def test_the_demo_reaches_its_goal():
    report = demo.run(quiet=True)
    assert report.healthy, report.to_dict()
    by_policy = report.by_policy()
    assert len(by_policy.pop(demo.KERAS)) == 1
    assert {*by_policy} == {*demo.POLICIES}
    assert {len(runs) for runs in by_policy.values()} == {demo.SEEDS}
