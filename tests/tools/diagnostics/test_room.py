"""The loss scale at which gradients are judged, and large losses."""

import keras
import numpy as np
import pytest

from tfmix.autocast import global_policy
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules
from tfmix.tools.diagnostics import check

FIRST = rules.DynamicLossScale().initial_scale
ON_JAX = keras.backend.backend() == "jax"


def growing(gain, **settings):
    """Returns a model whose gradients grow by a gain of about 2**11 times."""
    keras.utils.set_random_seed(0)
    small = keras.initializers.RandomNormal(stddev=0.3 / gain)
    wide = keras.layers.Dense(1024, "tanh", kernel_initializer="ones")
    with global_policy.policy_scope("mixed_float16"):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, kernel_initializer=small),
                keras.layers.Rescaling(gain),
                wide,
                keras.layers.Dense(1, kernel_initializer="ones"),
                keras.layers.Activation("linear", dtype="float32"),
            ]
        )
    optimizer = scaling.LossScaleOptimizer(
        keras.optimizers.SGD(1e-12), **settings
    )
    model.compile(optimizer, "mse")
    return model


def batch():
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    return x, x[:, :1]


@pytest.mark.costly
@pytest.mark.parametrize("jit", [True] if ON_JAX else [True, False])
@pytest.mark.parametrize("first", [FIRST, 2.0**10])
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_run_that_begins_at_the_checked_scale_skips_no_step(
    eagerly, first, jit
):
    model = growing(2.0**12, initial_scale=first)
    report = check.check(model, *batch())
    assert report.healthy
    assert report.loss_scale < first
    (note,) = report.notes
    assert f"model.optimizer.loss_scale = {report.loss_scale!r}" in note
    jit = jit and not eagerly
    model.compile(model.optimizer, "mse", jit_compile=jit, run_eagerly=eagerly)
    # Without that line, the search for the scale skips steps.
    model.fit(*batch(), batch_size=8, verbose=0)
    assert model.optimizer.skipped_steps > 3
    again = growing(2.0**12, initial_scale=first)
    again.compile(again.optimizer, "mse", jit_compile=jit, run_eagerly=eagerly)
    again.optimizer.loss_scale = report.loss_scale
    again.fit(*batch(), batch_size=8, verbose=0)
    assert again.optimizer.skipped_steps == 0
    assert again.optimizer.loss_scale == report.loss_scale


class Faint(keras.layers.Layer):
    """Returns about its input, and 1/4096 of the gradient."""

    def call(self, inputs):
        small = inputs * 2.0**-12
        return small + keras.ops.stop_gradient(inputs - small)


def headed(*hidden, policy="mixed_float16", last="float32"):
    with global_policy.policy_scope(policy):
        parts = [make() for make in hidden or [keras.layers.Identity]]
        head = keras.layers.Dense(1, dtype=last, name="head")
        return keras.Sequential([keras.Input((8,)), *parts, head])


# Each function returns a report on a model that `fit` can train.


def targets_of_any_size(size):
    model = headed(policy="float32")
    x, y = batch()
    return check.check(model, x, size * y, loss="mse", policy="mixed_float16")


def targets_of_a_float16_head():
    x, y = batch()
    report = check.check(headed(last=None), x, y * 1e5 + 1e6, loss="mse")
    # Its loss is computed in float32.
    dtypes = {row.dtype for row in report.rows if row.layer == "loss"}
    assert dtypes == {"float32"}
    return report


def a_factor(factor):
    def loss(y, outputs):
        return keras.ops.mean(keras.ops.square(y - outputs)) * factor

    return check.check(growing(1.0), *batch(), loss=loss)


@pytest.mark.every_case("each is a model of its own, and fast")
@pytest.mark.parametrize(
    "report",
    [
        *(lambda s=size: targets_of_any_size(s) for size in (1e-8, 5e4, 1e6)),
        targets_of_a_float16_head,
        *(lambda f=factor: a_factor(f) for factor in (1e-25, 1e25)),
    ],
)
def test_a_model_that_scales_inside_allows_any_loss(report):
    found = report()
    assert found.healthy, str(found)
    assert found.loss_scale == FIRST
    assert not [note for note in found.notes if "scale" in note]


def test_gradients_that_vanish_where_fit_begins_are_a_fault():
    model = headed(lambda: keras.layers.Dense(16), Faint, Faint)
    report = check.check(model, *batch(), loss="mse")
    assert report.loss_scale == FIRST
    assert {row.verdict for row in report.faults} == {"underflow"}


def test_targets_that_are_too_large_for_variables_in_float16_are_a_fault():
    model = headed(lambda: keras.layers.Dense(8, "relu"), policy="float16")
    x, y = batch()
    model.compile("sgd", "mse")
    first = check.check(model, x, y * 1e5 + 1e6).faults[0]
    assert (first.phase, first.verdict) == ("backward", "overflow")
    assert "float16 ends at 65504" in first.advice


def test_a_scale_that_never_moves_is_the_one_that_is_checked():
    model = growing(2.0**12, loss_scale=rules.FixedLossScale(FIRST))
    report = check.check(model, *batch())
    assert report.loss_scale == FIRST
    assert {row.verdict for row in report.faults} == {"overflow"}
