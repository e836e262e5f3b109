"""A model keeps its policy: rules, float32 outputs, losses and metrics."""

import keras
import numpy as np
import pytest
from keras import ops as kops

from tests import helpers, steps
from tfmix.autocast import global_policy
from tfmix.autocast import record as mixed_model
from tfmix.policy import policy as policies

FLOAT32 = keras.DTypePolicy("float32")


class Penalised(keras.layers.Layer):
    """Adds the sum of squares of its input to the loss."""

    def call(self, x):
        self.add_loss(kops.sum(kops.square(x)))
        return x


def penalised_model():
    regular = {"activity_regularizer": "l2", "dtype": "mixed_float16"}
    dense = keras.layers.Dense(3, **regular)
    penalised = Penalised(dtype="mixed_float16")
    model = keras.Sequential([keras.Input((4,)), dense, penalised])
    model.compile("sgd", "mse", metrics=["mse"])
    return model


def batch():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, 4)).astype("float32")
    return x, rng.normal(size=(8, 3)).astype("float32")


def identity(dtype):
    """Returns its input, rounded to a dtype on the way."""
    with global_policy.policy_scope(f"mixed_{dtype}"):
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Activation("linear")]
        )


@pytest.mark.parametrize("targets", ["float64", "float16"])
@pytest.mark.parametrize("mode", steps.MODES)
def test_an_error_of_300_is_not_infinite_in_fit(mode, targets):
    model = identity("float16")
    model.compile("sgd", "mse", metrics=["mse"], **steps.settings(mode))
    x = np.full((4, 3), 300.0, "float32")
    results = model.evaluate(x, np.zeros((4, 3), targets), verbose=0)
    assert results == [90000.0, 90000.0]


@pytest.mark.costly
def test_the_policy_of_a_model_holds_in_a_plain_call():
    inputs = keras.Input((1024,), dtype="float16")
    model = keras.Model(inputs, kops.normalize(inputs))
    x = np.full((1, 1024), 10.0, "float16")
    policy = policies.Policy("mixed_float16", float32_ops=["normalize"])
    for given, largest in ((None, 0), (policy, 0.03125), (FLOAT32, 0)):
        if given is not None:
            mixed_model.set_policy(model, given)
        assert mixed_model.policy_of(model) is (
            policy if given is policy else None
        )
        assert float(kops.max(model(x))) == largest


def test_a_model_with_a_policy_loads_without_it():
    x, _ = batch()
    with global_policy.policy_scope("mixed_float16"):
        model = penalised_model()
    objects = {"Penalised": Penalised}
    loaded = helpers.reloaded(model, compile=False, custom_objects=objects)
    # Plain Keras returns the 16-bit numbers.
    found = loaded.predict(x, verbose=0)
    assert found.dtype == "float16"
    np.testing.assert_array_equal(found, model.predict(x, verbose=0))


# JAX has float64 only where it is switched on.
@helpers.requires_backend("tensorflow")
def test_an_explicit_dtype_of_a_loss_is_obeyed():
    model = identity("float16")
    loss = keras.losses.MeanSquaredError(dtype="float64")
    result = loss(np.zeros((1, 3)), model(np.full((1, 3), 300.0)))
    assert helpers.dtype_of(result) == "float64"
