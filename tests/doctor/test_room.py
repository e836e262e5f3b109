"""Gradients that all but fill the format at the lowest loss scale."""

import keras
import numpy as np
import pytest
from keras import ops

from tfmix import _formats
from tfmix.doctor import check, latent, ranges
from tfmix.in_force.global_policy import current_policy
from tfmix.policy import policy as policies

FLOAT16 = _formats.FLOAT16


def found(largest, dtype="float16"):
    values = [np.array([largest, 1.0], "float32")]
    gap = ranges.gap(values, values, FLOAT16)
    return latent.no_room("layer", 0, [None, gap], [dtype])


@pytest.mark.parametrize("largest", [16_400.0, 65_504.0, 65_519.0])
def test_what_another_batch_may_overflow_is_named(largest):
    assert found(largest).verdict == "overflow"


@pytest.mark.parametrize("largest", [0.0, 16_000.0, 1e6])
def test_gradients_with_room_or_out_of_reach_are_not(largest):
    assert found(largest) is None


def test_float32_has_room():
    assert found(65_504.0, "float32") is None


def summed(gain):
    """A bias whose gradient is the number of rows times the gain."""
    keras.config.set_dtype_policy("mixed_float16")
    head = keras.layers.Activation("linear", dtype="float32")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), head])

    def loss(y, outputs):
        return gain * keras.ops.sum(outputs)

    x = np.full((32, 1), 0.5, "float32")
    return check.check(model, x, x, loss=loss)


def test_a_loss_scale_of_1_without_room_is_a_fault():
    report = summed(2.0**10)
    assert report.loss_scale == 1.0
    (row,) = report.faults
    assert row.layer.startswith("dense")
    assert row.phase == "backward"
    assert "loss scale of 1" in row.advice


def test_a_loss_scale_of_1_with_room_is_none():
    assert summed(2.0**8).healthy


def test_under_a_policy_it_is_no_fault():
    # It scales gradients inside, by what they need.
    policy = summed(2.0**10).suggested_policy(progress=False)
    assert policy == policies.Policy("mixed_float16")


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_probabilities_are_made_in_float32_by_what_made_them(activation):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 4)).astype("float32")
    y = (x[:, :2] > 0).astype("float32")
    last = keras.layers.Dense(2, activation, dtype="mixed_float16", name="last")
    model = keras.Sequential([keras.Input((4,)), last])
    report = check.check(model, x, y, loss="mse")
    # As the warning of `fit` says.
    wanted = 'Dense(..., name="last", dtype="float32")'
    assert [row for row in report.rows if row.advice.startswith(wanted)]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        ("sigmoid", "binary_crossentropy"),
        ("softmax", "categorical_crossentropy"),
    ],
)
def test_check_and_fit_agree_on_probabilities_that_a_loss_undoes(
    said, activation, loss
):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    y = np.stack([x[:, 0] > 0, x[:, 0] <= 0], 1).astype("float32")
    with current_policy.policy_scope("mixed_float16"):
        head = keras.layers.Dense(2, activation)
        model = keras.Sequential([keras.Input((4,)), head])
    model.compile("sgd", loss)
    model.fit(x, y, verbose=0)
    is_undone = keras.backend.backend() == "tensorflow"
    assert check.check(model, x, y).healthy == is_undone
    assert (not said) == is_undone


def fitted(policy, last):
    with current_policy.policy_scope(policy):
        hidden = keras.layers.Dense(8, "relu")
        head = keras.layers.Dense(1, dtype=last, name="head")
        model = keras.Sequential([keras.Input((4,)), hidden, head])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    return check.check(model, x, x[:, :1] * 1e5 + 1e6)


def test_a_model_that_scales_inside_has_room_for_every_loss():
    report = fitted("mixed_float16", "float32")
    assert report.healthy
    assert report.loss_scale < 1.0


def test_targets_that_are_too_large_for_variables_in_float16_are_told_of():
    report = fitted("float16", "float32")
    (loss,) = [row for row in report.faults if row.layer == "loss"]
    # A loss that is given by name holds no mean to write.
    assert loss.advice.startswith("y = (y - y.mean()) / y.std()  # the loss is")


def test_the_loss_of_a_float16_head_is_in_float32_and_at_no_fault():
    report = fitted("mixed_float16", None)
    assert {row.dtype for row in report.rows if row.layer == "loss"} == {
        "float32"
    }
    assert report.healthy


def length(x, smallest=1e-8):
    return ops.sqrt(ops.sum(x * x, -1, keepdims=True)) + smallest


class Unit(keras.layers.Layer):
    """Hides its epsilon in the default of a function that it calls."""

    def call(self, x):
        return x / length(x)


def test_an_epsilon_is_found_wherever_the_code_of_a_layer_holds_it():
    # Of a model of plain Keras's, where no layer falls back to float32.
    unit = Unit(name="unit", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((4,)), unit, keras.layers.Dense(1)])
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    report = check.check(model, x, x[:, :1], loss="mse")
    named = {row.layer: row.advice for row in report.faults}
    assert "1e-08 is 0 in float16" in named["unit"]
