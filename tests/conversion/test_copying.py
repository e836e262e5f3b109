"""Copies of models: all that Keras can save, or an error that says why not."""

import keras
import numpy as np
import pytest

from tests import helpers
from tests.conversion import test_convert
from tfmix.conversion import convert, copying
from tfmix.policy import policy as policies

X = np.random.default_rng(5).normal(size=(8, 4)).astype("float32")


class OwnLayer(keras.layers.Layer):
    def call(self, x):
        return x * 2.0


@pytest.mark.costly
@pytest.mark.parametrize("kind", test_convert.KINDS)
def test_a_copy_is_converted_and_the_source_untouched(kind):
    model = test_convert.compiled(kind())
    before = test_convert.predict(model)
    twin = convert.convert_model(model, "mixed_float16")
    assert type(twin) is type(model)
    assert test_convert.layer(twin, "body").compute_dtype == "float16"
    assert test_convert.layer(model, "body").compute_dtype == "float32"
    for mine, theirs in zip(twin.weights, model.weights, strict=True):
        assert mine is not theirs
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(test_convert.predict(model), before)
    assert test_convert.close(test_convert.predict(twin), before, "float16")


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["float16", "bfloat16", *test_convert.MIXED])
def test_a_copy_for_inference_only_predicts(policy, tmp_path):
    model = test_convert.compiled(test_convert.functional(), "adam")
    model.fit(test_convert.X, test_convert.Y, verbose=0)
    twin = convert.convert_model(model, policy, inference=True)
    assert not twin.compiled
    assert not twin.trainable_variables
    assert twin.optimizer is None
    dtype = policy.removeprefix("mixed_")
    assert test_convert.layer(twin, "body").compute_dtype == dtype
    found, expected = map(test_convert.predict, (twin, model))
    assert test_convert.close(found, expected, dtype)
    twin.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(test_convert.predict(loaded), found)


def test_rules_and_maps_find_nested_layers_of_a_copy_by_their_path():
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4, name="one")], name="inner"
    )
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(2)(keras.layers.Dense(4)(inner(inputs)))
    model = keras.Model(inputs, outputs)
    chosen = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
    chosen["inner/one"] = keras.DTypePolicy("mixed_bfloat16")
    ruled = policies.Policy("mixed_float16", float32_layers=["inner/.*"])
    for policy, dtype in ((chosen, "bfloat16"), (ruled, "float32")):
        twin = convert.convert_model(model, policy)
        one = twin.get_layer("inner").get_layer("one")
        assert one.compute_dtype == dtype
        assert twin.layers[2].compute_dtype == "float16"


class NoConfig(keras.layers.Layer):
    def __init__(self, needed, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(needed.units)

    def call(self, x):
        return self.dense(x)


class Forgetful(keras.layers.Dense):
    def load_own_variables(self, store):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OwnLayer, "'OwnLayer'"),
        (lambda: NoConfig(type("Units", (), {"units": 2})()), "NoConfig"),
        (lambda: Forgetful(2), "other weights than the model"),
    ],
)
def test_the_class_that_cannot_be_copied_is_named(make, message):
    model = keras.Sequential([keras.Input((4,)), make()])
    with (
        keras.saving.custom_object_scope({"Forgetful": Forgetful}),
        pytest.raises(TypeError, match=message),
    ):
        convert.convert_model(model, "mixed_float16")


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_the_cause_of_a_failed_copy_is_reported():
    shared = keras.layers.Dense(4)
    tower = keras.Sequential([keras.Input((4,)), shared])
    inputs = keras.Input((4,))
    model = keras.Model(inputs, shared(tower(inputs)))
    with pytest.raises(TypeError) as caught:
        convert.convert_model(model, "mixed_float16")
    message = str(caught.value)
    assert "expected 2 variables, but received 0" in message
    assert "convert it in place: apply_policy(model, policy)" in message


def test_trained_adapters_are_copied():
    model = keras.Sequential(
        [keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(2)]
    )
    model.layers[0].enable_lora(2)
    model.compile("sgd", loss="mse")
    x = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
    model.fit(x, x[:, :2], verbose=0)
    # The second factor is 0 until it is trained.
    assert np.any(model.layers[0].lora_kernel_b.numpy())
    twin = copying.copy_model(model)
    for copy, original in zip(twin.weights, model.weights, strict=True):
        helpers.assert_same_bits(copy, original)
    assert len(twin.trainable_variables) == len(model.trainable_variables)
    twin.fit(x, x[:, :2], verbose=0)
    # A copy in another policy trains as well.
    convert.convert_model(model, "mixed_bfloat16").fit(x, x[:, :2], verbose=0)


def test_a_copy_is_rematerialized_like_the_model():
    with keras.RematScope(mode="full"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.add(keras.layers.Dense(2))
    twin = convert.convert_model(model, "mixed_bfloat16")
    modes = [getattr(x._remat_mode, "mode", None) for x in twin.layers]
    assert modes == ["full", None]


def test_a_model_with_an_unbuilt_optimizer_is_copied():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", loss="mse")
    assert not model.optimizer.built
    twin = copying.copy_model(model)
    assert twin.optimizer.inner_optimizer.iterations == 0
    assert twin.optimizer.initial_scale == model.optimizer.initial_scale
    # Once the optimizer is built, its state is copied.
    model.fit(X, X[:, :2], verbose=0)
    assert copying.copy_model(model).optimizer.inner_optimizer.iterations == 1
