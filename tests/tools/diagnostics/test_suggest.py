"""The suggested policy: found by measuring, small, and good to train with."""

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


def test_a_policy_without_16_bit_layers_comes_with_a_warning(caplog):
    report = loud(float32_output.float32_output())
    policy = report.suggested_policy()
    assert "loud" in policy.float32_layers
    assert any("nothing is left in 16 bit" in m for m in caplog.messages)
    assert any("mixed_bfloat16" in m for m in caplog.messages)


def test_a_float32_layer_gets_no_advice_to_become_one():
    report = loud(float32_output.float32_output(name="last"))
    advice = {row.layer: row.advice for row in report.faults}
    assert advice["loud"].startswith("Loud(")
    assert "last" not in advice
    assert "Activation(" not in str(report)
