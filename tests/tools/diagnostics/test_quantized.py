"""Quantized layers are judged with the same integers in both runs."""

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.tools.diagnostics import check


def quantized(policy="mixed_bfloat16", lora=None, activation="relu"):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(16, activation, dtype=policy, name="first"),
            keras.layers.Dense(4, dtype=policy, name="last"),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )
    for layer in model.layers[:2]:
        layer.quantize("int8")
        if lora:
            layer.enable_lora(lora)
    return model


def batch():
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    return x, x[:, :4].copy()


@pytest.mark.costly
@pytest.mark.parametrize("lora", [None, 2])
def test_int8_layers_are_judged_in_both_directions(lora):
    model = quantized(lora=lora)
    policies = [layer.dtype_policy for layer in model.layers]
    report = check.check(model, *batch(), loss="mse")
    phases = {(row.layer, row.phase) for row in report.rows}
    assert {("first", "forward"), ("last", "backward")} <= phases
    assert report.healthy, str(report)
    # Both runs have the same integers, so only bfloat16's rounding differs.
    errors = {(row.layer, row.phase): row.relative_error for row in report.rows}
    assert 0 < errors["first", "forward"] < helpers.TOLERANCES["bfloat16"]
    assert [layer.dtype_policy for layer in model.layers] == policies


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_16_bit_constant_does_not_stop_the_check(dtype):
    with_policy = {"dtype": f"mixed_{dtype}"}
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(16, **with_policy)(inputs)
    hidden = hidden * keras.ops.cast(4.0, dtype)
    outputs = keras.layers.Dense(4, **with_policy)(hidden)
    outputs = keras.layers.Activation("linear", dtype="float32")(outputs)
    report = check.check(keras.Model(inputs, outputs), *batch(), loss="mse")
    assert report.healthy, str(report)
