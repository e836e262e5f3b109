"""Losses that sum over pixels, masks, and shared layers."""

import keras
import numpy as np
import pytest
from keras import ops

import tfmix
from tfmix import _formats
from tfmix.callbacks import sampler
from tfmix.diagnostics import check


def over_pixels(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


@pytest.mark.slow
def test_a_sum_over_pixels_only_overflows_under_keras_policy():
    """Its gradients overflow; tfmix chooses a scale for their size."""
    report = checked_sum_over_pixels(keras.config.set_dtype_policy)
    first = report.rows[0]
    found = (first.layer, first.phase, first.verdict)
    assert found == ("picture", "backward", "overflow")
    assert checked_sum_over_pixels(tfmix.set_global_policy).healthy


def checked_sum_over_pixels(set_policy):
    """Checks a loss of several outputs, which are float32 as in `fit`."""
    keras.utils.set_random_seed(0)
    set_policy("mixed_float16")
    inputs = keras.Input((64, 64, 1))
    hidden = keras.layers.Conv2D(6, 3, padding="same", activation="relu")(
        inputs
    )
    picture = keras.layers.Conv2D(1, 1, name="picture")(hidden)
    number = keras.layers.Dense(1)(
        keras.layers.GlobalAveragePooling2D()(hidden)
    )
    model = keras.Model(inputs, [picture, number])
    x = np.random.default_rng(0).normal(size=(16, 64, 64, 1))
    y = [x + 3.0, x.mean((1, 2))]
    return check.check(model, x, y, loss=[over_pixels, "mse"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_that_mark_masked_steps_do_not_move(dtype):
    """Otherwise `x != -1` would be true everywhere, which is an error."""
    marks = ops.convert_to_tensor([-1.0, 0.0, 0.5, -99.0], dtype)
    layer = keras.layers.Masking(-1.0)
    limits = _formats.limits(dtype)
    found = sampler.unrounded(marks, layer, limits)
    assert np.array_equal(found, [-1.0, 0.0, 0.5, -99.0])
    values = np.random.default_rng(0).normal(size=1000)
    rounded = ops.cast(ops.convert_to_tensor(values), dtype)
    exact = np.array(ops.cast(rounded, "float32"))
    moved = np.array(sampler.unrounded(rounded, layer, limits)) / exact - 1
    assert 0.4 < np.mean(moved != 0.0) < 0.6
    rms = np.sqrt(np.mean(moved**2))
    assert rms == pytest.approx(0.2 * limits.epsilon, rel=0.1)


def test_a_batch_without_rows_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"at least one row.*\(0, 4\)"):
        check.check(model, np.zeros((0, 4)), np.zeros((0, 1)), loss="mse")


class Shared(keras.layers.Layer):
    """A layer with an inner layer; the model calls it twice."""

    def __init__(self, name):
        super().__init__(name=name)
        self.inner = keras.layers.Dense(4, use_bias=False, name="inner")

    def call(self, x):
        return self.inner(x) / 1e3


def test_each_call_of_a_layer_inside_a_shared_one_is_judged():
    block, inputs = Shared("block"), keras.Input((4,))
    # Only in the second call, the inner layer's output exceeds 65504.
    model = keras.Model(inputs, block(block(inputs) * 1e5))
    model.set_weights([np.full((4, 4), 100.0, "float32")])
    x = np.ones((8, 4), "float32")
    report = check.check(model, x, policy="mixed_float16")
    forward = [row for row in report.rows if row.phase == "forward"]
    verdicts = {row.layer: row.verdict for row in forward}
    assert verdicts["inner"] == "overflow"
