"""`check` judges the float8 products of each chosen layer."""

import json

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers
from tests.float8 import test_chosen_layers as chosen
from tests.float8 import test_product
from tfmix.float8 import chosen_layers, product

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# An outlier of this size flushes all other numbers to zero.
OUTLIER = 6e4


def batch(outlier=False):
    x, y = chosen.digits()
    x, y = x[:64].copy(), y[:64]
    if outlier:
        x[0, :] = OUTLIER
    return x, y


def in_float8(values, to):
    """Returns scaled values in float8, and the share flushed to zero."""
    values = values.astype(ml_dtypes.bfloat16).astype("float64")
    near, _ = test_product.expected_factor(values, to)
    there = values != 0
    return near, (there & (near == 0)).sum() / there.sum()


def cosine(a, b):
    return (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())


def test_measurements_agree_with_numpy():
    rng = np.random.default_rng(0)
    # The numbers have many sizes, so that some underflow.
    x = rng.normal(size=(32, 16)) * 2.0 ** rng.integers(-30, 1, (32, 16))
    x = x.astype("float32")
    with tfmix.policy_scope(chosen.policy("wide")):
        inputs = keras.Input((16,))
        wide = layers.Dense(32, name="wide", activation="tanh")
        model = keras.Model(inputs, tfmix.float32_output()(wide(inputs)))
    y = rng.normal(size=(32, 32)).astype("float32")
    report = tfmix.check(model, x, y, loss="mse")
    found = {one.product: one for one in report.float8}

    kernel, bias = map(helpers.to_numpy, wide.get_weights())
    made = np.tanh(x @ kernel + bias)
    gradient = 2 * (made - y) / y.size * (1 - made**2)
    forward, back = product.FORWARD, product.GRADIENT
    for name, (a, to_a), (b, to_b) in (
        ("forward", (x, forward), (kernel, forward)),
        ("input gradient", (gradient, back), (kernel.T, forward)),
        ("kernel gradient", (x.T, forward), (gradient, back)),
    ):
        near_a, lost_a = in_float8(a, to_a)
        near_b, lost_b = in_float8(b, to_b)
        one = found[name]
        assert one.layer == "wide"
        assert one.underflow == pytest.approx(max(lost_a, lost_b), abs=0.004)
        assert one.cosine == pytest.approx(
            cosine(near_a @ near_b, a.astype("float64") @ b), abs=1e-3
        )
        assert one.saturated == 0
    assert found["forward"].underflow > 0.2


def test_every_chosen_layer_is_measured_also_inside_attention():
    report = tfmix.check(chosen.classifier(), *batch(), loss=LOSS)
    names = {one.layer for one in report.float8}
    assert {"embed", "wide", "back", "attention/query"} <= names
    assert len(report.float8) == 3 * 7
    assert report.healthy
    assert report.title.startswith("mixed_float8 against float32: healthy")
    assert all(one.cosine > 0.99 for one in report.float8)


@pytest.mark.slow
def test_a_float32_model_is_measured_and_does_not_change():
    model = chosen.classifier("float32")
    report = tfmix.check(model, *batch(), loss=LOSS, policy=chosen.policy())
    assert len(report.float8) == 3 * 7
    assert not chosen_layers.reasons(model)
    # So is a float8 model, under another policy.
    model = chosen.classifier()
    model(batch()[0])
    before = chosen_layers.reasons(model)
    report = tfmix.check(model, *batch(), loss=LOSS, policy="mixed_float16")
    assert not report.float8
    assert chosen_layers.reasons(model) == before


def test_without_targets_nothing_is_measured():
    assert not tfmix.check(chosen.classifier(), batch()[0]).float8


@pytest.mark.slow
def test_a_layer_with_an_outlier_goes_back_to_bfloat16(tmp_path):
    model = chosen.classifier("float32")
    x, y = batch(outlier=True)
    report = tfmix.check(model, x, y, loss=LOSS, policy=chosen.policy())
    worst = report.float8[0]
    assert worst.verdict == "underflow"
    assert worst.underflow > 0.1
    assert not report.healthy
    faulty = {one.layer for one in report.float8 if not one.is_fine}
    assert json.loads(report.to_json())["float8"][0]["layer"] == worst.layer
    report.to_html(tmp_path / "report.html")
    assert worst.product in (tmp_path / "report.html").read_text("utf-8")

    suggested = report.suggested_policy()
    assert suggested.is_float8
    assert not faulty & set(suggested.float8_layers)
    assert tfmix.check(model, x, y, loss=LOSS, policy=suggested).healthy
    # The report prints this policy.
    (line,) = [
        one for one in str(report).splitlines() if one.startswith("tfmix.Pol")
    ]
    assert eval(line) == suggested


def test_the_worse_of_two_calls_is_reported():
    with tfmix.policy_scope(chosen.policy("twice")):
        inputs = keras.Input((32,))
        twice = layers.Dense(32, name="twice")
        # Rescaling creates an outlier for the second call.
        scaled = layers.Lambda(lambda x: x * np.logspace(-8, 8, 32))
        hidden = twice(inputs) + twice(scaled(inputs))
        model = keras.Model(inputs, tfmix.float32_output()(hidden))
    x = np.random.default_rng(1).normal(size=(64, 32)).astype("float32")
    report = tfmix.check(model, x, 0 * x, loss="mse")
    forward = [one for one in report.float8 if one.product == "forward"]
    assert len(forward) == 1
    assert forward[0].underflow > 0.3
