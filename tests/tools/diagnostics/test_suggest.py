"""The suggested policy: found by measuring, small, and good to train with."""

import dataclasses

import keras
import numpy as np

from tests.tools.diagnostics import faults
from tfmix.autocast import float32_output
from tfmix.tools.diagnostics import check


def loud(*more):
    """Checks a model whose first layer overflows in Keras's float16."""
    keras.config.set_dtype_policy("mixed_float16")
    parts = [keras.Input((4,)), faults.Loud(name="loud"), *more]
    return check.check(keras.Sequential(parts), np.ones((8, 4)))


def test_a_candidate_that_cannot_run_does_not_stop_the_search():
    report = loud(keras.layers.Dense(4), float32_output.float32_output())
    needed = list(report.targets)[0]

    def again(policy):
        # A custom layer that mixes dtypes fails in this way.
        if needed not in policy.float32_layers:
            raise TypeError("float32 is not float16")
        return dataclasses.replace(report.again(policy), again=again)

    mixing = dataclasses.replace(report, again=again)
    policy = mixing.suggested_policy(progress=False)
    assert needed in policy.float32_layers
    assert report.again(policy).healthy


def test_a_policy_without_16_bit_layers_comes_with_a_warning(caplog):
    report = loud(float32_output.float32_output())
    policy = report.suggested_policy(progress=False)
    assert "loud" in policy.float32_layers
    assert any("nothing is left in 16 bit" in m for m in caplog.messages)
    assert any("mixed_bfloat16" in m for m in caplog.messages)


def test_a_float32_layer_gets_no_advice_to_become_one():
    report = loud(float32_output.float32_output(name="last"))
    advice = {row.layer: row.advice for row in report.faults}
    assert advice["loud"].startswith("Loud(")
    assert advice["last"].startswith("# its input does not fit"), advice
    assert "Activation(" not in str(report)
