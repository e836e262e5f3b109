"""The dtype of what comes out of a model, by the way it is called."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

X = np.ones((4, 3), "float32")
NAMES = ("mixed_float16", "mixed_bfloat16")


def made(name):
    with tfmix.policy_scope(name):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False)
    return model


def dtype_of(value):
    return keras.backend.standardize_dtype(value.dtype)


WAYS = {
    "__call__": lambda model: model(X),
    "predict": lambda model: model.predict(X, verbose=0),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
    "stateless_call": lambda model: model.stateless_call(
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        X,
    )[0],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_returns_float32(way, name):
    assert dtype_of(WAYS[way](made(name))) == "float32"


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_and_a_model_inside_another_return_16_bit(name):
    model, seen = made(name), []

    class Outer(keras.Model):
        def call(self, x):
            y = model(x)
            seen.append(dtype_of(y))
            return y

    with tfmix.policy_scope(name):
        outer = Outer()
    assert dtype_of(outer(X)) == "float32"
    assert dtype_of(model.layers[0](ops.convert_to_tensor(X))) == name[6:]
    assert set(seen) == {name[6:]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "method", ["fit", "evaluate", "train_on_batch", "test_on_batch"]
)
def test_losses_see_float32(method, name):
    model, seen = made(name), []

    def loss(y_true, y_pred):
        seen.append(dtype_of(y_pred))
        return ops.mean(ops.square(y_true - y_pred), -1)

    model.compile("sgd", loss, jit_compile=False)
    options = {"verbose": 0} if method in ("fit", "evaluate") else {}
    result = getattr(model, method)(X, X[:, :2], **options)
    if method == "fit":
        result = result.history["loss"][0]
    assert set(seen) == {"float32"}
    assert np.isfinite(result)


@helpers.requires_backend("tensorflow")
def test_an_exported_model_returns_float32(tmp_path):
    import tensorflow as tf

    model = made("mixed_float16")
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert loaded.serve(tf.constant(X)).dtype == tf.float32
