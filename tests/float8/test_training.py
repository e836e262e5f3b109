"""Training in float8 ends inside the noise of bfloat16's seeds."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers
from tests.float8 import test_chosen_layers as digits_model

SEEDS = range(3)
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
HOW = ["graph", "xla", "replicas"] if ON_TENSORFLOW else ["xla", "devices"]


def forecaster(rules):
    """Returns a model that forecasts the next year of a series from 32.

    Its first and last layer are not in float8, as by default.
    """
    if isinstance(rules, tfmix.Policy):
        rules = digits_model.policy("inner_.*")
    with tfmix.policy_scope(rules):
        model = keras.Sequential([keras.Input((32,))])
        for name in ("first", "inner_1", "inner_2"):
            model.add(layers.Dense(64, activation="gelu", name=name))
        model.add(layers.Dense(1, dtype="float32"))
    return model


def years():
    """Returns windows of the yearly sunspots, and the year after each."""
    sunspots = pytest.importorskip("statsmodels.datasets").sunspots
    values = sunspots.load_pandas().data["SUNACTIVITY"].to_numpy("float32")
    values = np.sqrt(values) / 10
    windows = np.lib.stride_tricks.sliding_window_view(values, 33)
    return windows[:, :32].copy(), windows[:, 32:].copy()


def pictures():
    x, y = digits_model.digits()
    return x, y.astype("int32")


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {
    "digits": (digits_model.classifier, pictures, CROSS_ENTROPY, 1536, 6),
    "sunspots": (forecaster, years, "mse", 240, 20),
}


@contextlib.contextmanager
def devices(how):
    """Yields a scope for the model: two replicas, eight devices or nothing."""
    if how == "replicas":
        yield helpers.mirrored_strategy().scope()
    elif how == "devices":
        found = keras.distribution.list_devices()[:8]
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=found)
        )
        yield contextlib.nullcontext()
        keras.distribution.set_distribution(None)
    else:
        yield contextlib.nullcontext()


def trained(name, rules, how, seed):
    """Returns the loss on held-out rows, and the report of `check`."""
    make, data, loss, rows, epochs = MODELS[name]
    x, y = data()
    keras.utils.set_random_seed(seed)
    with devices(how) as scope:
        with scope:
            model = make(rules)
            model.compile(
                keras.optimizers.Adam(3e-3),
                loss=loss,
                jit_compile=how in ("xla", "devices"),
            )
        model.fit(x[:rows], y[:rows], batch_size=48, epochs=epochs, verbose=0)
        held_out = len(x[rows:]) // 8 * 8
        x, y = x[rows : rows + held_out], y[rows : rows + held_out]
        score = model.evaluate(x, y, batch_size=held_out, verbose=0)
    report = None
    if how in ("graph", "xla"):
        report = tfmix.check(model, x[:32], y[:32], loss=loss)
    return score, report


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_three_seeds_end_inside_the_noise_of_bfloat16(name, how):
    scores = {}
    for kind, rules in (
        ("16", "mixed_bfloat16"),
        ("8", digits_model.policy()),
    ):
        runs = [trained(name, rules, how, seed) for seed in SEEDS]
        scores[kind] = np.array([score for score, _ in runs])
        for _, report in runs:
            if kind == "8" and report is not None:
                assert report.healthy, str(report)
    print(name, how, scores)
    noise = np.ptp(scores["16"])
    assert abs(scores["8"].mean() - scores["16"].mean()) <= noise
