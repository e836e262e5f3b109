"""`check` judges float16 without loss scaling as it trains."""

import keras
import numpy as np
import pytest
from keras import ops

from tfmix._keras import replacing
from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.diagnostics import check

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1]
JIT = keras.backend.backend() == "jax"


@pytest.fixture(autouse=True)
def compiled_by_keras_alone():
    """Switches off what `import tfmix` does."""
    replacing.want(replacing.COMPILE, False)


def build(dtype="mixed_float16", optimizer="sgd", **settings):
    layers = [
        keras.layers.Dense(8, "tanh", dtype=dtype, name="first"),
        keras.layers.Dense(1, dtype=dtype, name="last"),
        keras.layers.Activation("linear", dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    # XLA's compilation would take longer than all tests of this file.
    settings = {"loss": "mse", "jit_compile": JIT} | settings
    model.compile(optimizer, **settings)
    return model


def faint(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred)) * 1e-7


SCALING = {
    "ours": lambda: scaling.LossScaleOptimizer("sgd"),
    "Keras's": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD()
    ),
    "a factor": lambda: keras.optimizers.SGD(loss_scale_factor=128.0),
}


@pytest.mark.parametrize("name", SCALING)
def test_an_optimizer_with_a_scale_is_judged_with_it(name):
    report = check.check(build(optimizer=SCALING[name](), loss=faint), X, Y)
    assert report.loss_scale == 2.0**15


def test_gradients_without_a_scale_are_judged_so():
    report = check.check(build(loss=faint), X, Y)
    assert report.loss_scale == 1.0
    first = report.rows[0]
    assert (first.phase, first.verdict) == ("backward", "underflow")
    assert first.advice.startswith("tfmix.LossScaleOptimizer(optimizer)")
    # Only the scale is missing, so no layer should become float32.
    suggested = report.suggested_policy()
    assert suggested == report.policy


def test_check_of_another_policy_does_not_warn():
    report = check.check(build(loss=faint), X, Y, policy="mixed_bfloat16")
    assert not report.notes
