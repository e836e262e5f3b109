"""The loss scale at which gradients are judged, and large losses."""

import keras
import numpy as np

from tfmix.autocast import global_policy
from tfmix.diagnostics import check


def fitted(policy, last):
    with global_policy.policy_scope(policy):
        hidden = keras.layers.Dense(8, "relu")
        head = keras.layers.Dense(1, dtype=last, name="head")
        model = keras.Sequential([keras.Input((4,)), hidden, head])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    return check.check(model, x, x[:, :1] * 1e5 + 1e6)


def test_a_model_that_scales_inside_allows_any_loss():
    report = fitted("mixed_float16", "float32")
    assert report.healthy
    assert report.loss_scale < 1.0


def test_targets_that_are_too_large_for_variables_in_float16_are_a_fault():
    report = fitted("float16", "float32")
    first = report.faults[0]
    assert (first.phase, first.verdict) == ("backward", "overflow")
    assert "float16 ends at 65504" in first.advice


def test_the_loss_of_a_float16_head_is_fine_in_float32():
    report = fitted("mixed_float16", None)
    assert {row.dtype for row in report.rows if row.layer == "loss"} == {
        "float32"
    }
    assert report.healthy
