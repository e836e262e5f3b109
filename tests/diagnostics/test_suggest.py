"""The suggested policy: found by measuring, small, and good to train with."""

import dataclasses

import keras
import numpy as np
import pytest

from tests.diagnostics import numerics_faults
from tfmix.autocast import float32_output
from tfmix.conversion import convert, planned_policies
from tfmix.diagnostics import check
from tfmix.loss_scaling import optimizer as scaling

# Sums over pixels need a smaller learning rate. Attention without the division
# has huge gradients when another row becomes the largest.
RATES = {"loss_over_pixels": 1e-9, "unscaled_attention": 1e-3}


def trained(model, planted, rate):
    keras.utils.set_random_seed(0)
    optimizer = scaling.LossScaleOptimizer(
        keras.optimizers.SGD(rate), initial_scale=1.0
    )
    model.compile(optimizer, planted.loss)
    history = model.fit(planted.x, planted.y, epochs=15, verbose=0)
    return history.history["loss"][-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=() if kind == "activation_overflow" else pytest.mark.slow,
        )
        for kind in numerics_faults.KINDS
    ],
)
def test_the_suggested_policy_trains_to_the_loss_of_float32(kind):
    planted = numerics_faults.plant(kind, seed=2)
    model, rate = planted.model, RATES.get(kind, 1e-2)
    report = check.check(model, planted.x, planted.y, loss=planted.loss)
    policy = report.suggested_policy(progress=False)
    assert report.again(policy).healthy
    weights = [np.array(variable) for variable in model.variables]
    before = {layer: layer._dtype_policy for layer in model._flatten_layers()}
    for layer, dtype in planned_policies.reference(model).items():
        object.__setattr__(layer, "_dtype_policy", dtype)
    expected = trained(model, planted, rate)
    for layer, dtype in before.items():
        object.__setattr__(layer, "_dtype_policy", dtype)
    for variable, value in zip(model.variables, weights, strict=True):
        variable.assign(value)
    convert.apply_policy(model, policy)
    found = trained(model, planted, rate)
    assert found == pytest.approx(expected, rel=0.01)


def test_a_candidate_that_cannot_run_does_not_stop_the_search():
    planted = numerics_faults.plant("activation_overflow", 2)
    report = check.check(planted.model, planted.x)
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
    keras.config.set_dtype_policy("mixed_float16")
    parts = [numerics_faults.Loud(name="loud"), float32_output.float32_output()]
    model = keras.Sequential([keras.Input((4,)), *parts])
    report = check.check(model, np.ones((8, 4)))
    policy = report.suggested_policy(progress=False)
    assert "loud" in policy.float32_layers
    assert any("nothing is left in 16 bit" in m for m in caplog.messages)
    assert any("mixed_bfloat16" in m for m in caplog.messages)


def test_a_float32_layer_gets_no_advice_to_become_one():
    keras.config.set_dtype_policy("mixed_float16")
    last = float32_output.float32_output(name="last")
    parts = [numerics_faults.Loud(name="loud"), last]
    model = keras.Sequential([keras.Input((4,)), *parts])
    report = check.check(model, np.ones((8, 4)))
    advice = {row.layer: row.advice for row in report.faults}
    assert advice["loud"].startswith("Loud(")
    assert advice["last"].startswith("# its input does not fit"), advice
    assert "Activation(" not in str(report)
