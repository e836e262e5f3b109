"""`check` and the monitors warn about float16 without loss scaling."""

import keras
import numpy as np
import pytest
from keras import ops

from tfmix._keras import replacing
from tfmix.loss_scaling import optimizer as scaling
from tfmix.tools.diagnostics import check, missing_scaler

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1]
warning = missing_scaler.warning
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


@pytest.mark.parametrize(
    ("dtype", "optimizer", "name"),
    [
        ("mixed_float16", "sgd", "SGD"),
        ("float16", "adam", "Adam"),
        ("float32", "sgd", None),
        ("mixed_bfloat16", "sgd", None),
        *(("mixed_float16", made, None) for made in SCALING),
    ],
)
def test_an_optimizer_without_a_scale_is_named_with_the_fix(
    dtype, optimizer, name
):
    given = SCALING.get(optimizer, lambda: optimizer)()
    note = warning(build(dtype, given))
    if name is None:
        assert note == ""
    else:
        assert f"{name} does not scale the loss" in note
        assert f"tfmix.LossScaleOptimizer({name}(...))" in note


def test_a_model_under_keras_policy_is_seen_once_it_is_compiled():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    assert warning(model) == ""
    model.compile("sgd", "mse", auto_scale_loss=False)
    assert "SGD does not scale" in warning(model)


def test_check_warns_and_judges_gradients_without_a_scale():
    report = check.check(build(loss=faint), X, Y)
    assert "does not scale the loss" in report.notes[0]
    assert report.loss_scale == 1.0
    assert "does not scale the loss" in str(report)
    first = report.rows[0]
    assert (first.phase, first.verdict) == ("backward", "underflow")
    assert first.advice.startswith("tfmix.LossScaleOptimizer(optimizer)")
    # Only the scale is missing, so no layer should become float32.
    suggested = report.suggested_policy()
    assert suggested == report.policy


def test_check_of_another_policy_does_not_warn():
    report = check.check(build(loss=faint), X, Y, policy="mixed_bfloat16")
    assert not report.notes
