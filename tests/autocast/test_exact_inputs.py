"""Ids and raw features reach the layer that needs them before any cast."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers, steps
from tfmix.autocast import global_policy


class TokenLayer(keras.layers.Layer):
    """A layer from Keras's example of text classification."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens
        self.positions = keras.layers.Embedding(3, 2)

    def call(self, x):
        return self.tokens(x) + self.positions(keras.ops.arange(3)) * 0


class Around(keras.Model):
    """Passes its input to an inner model, like many users' models."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("rows", [60_000, 2048])
def test_float_ids_that_were_changed_after_the_cast_are_reported(said, rows):
    class Slices(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(rows, 1)

        def call(self, x):
            return self.embedding(keras.ops.relu(x))

    with global_policy.policy_scope("mixed_float16"):
        Slices()(np.ones((1, 4), "float32"))
    if rows == 2048:
        # Float16 holds all of these ids.
        assert not said
    else:
        assert "2048" in said[0]
        assert "int32" in said[0]


def test_discretization_sees_values_beside_its_boundaries():
    with global_policy.policy_scope("mixed_float16"):
        model = Around(keras.layers.Discretization([4096.5]))
    result = model(np.array([[4096.0], [4097.0]], "float32"))
    assert keras.ops.convert_to_numpy(result).ravel().tolist() == [0, 1]


def functional(layer, width):
    """Makes a Functional model of one layer."""
    inputs = keras.Input((width,))
    return keras.Model(inputs, layer(inputs))


def sequential(*layers):
    return keras.Sequential(layers)


# Models of an Embedding, in the forms that Keras's guides have.
FORMS = {
    "Sequential": lambda e: sequential(e, keras.layers.Flatten()),
    "with an input": lambda e: sequential(
        sequential(keras.Input((3,)), e), keras.layers.Flatten()
    ),
    "functional": lambda e: functional(e, 3),
    "Sequential in a user's model": lambda e: Around(sequential(e)),
    "in a user's model": Around,
    "in a user's layer": lambda e: functional(TokenLayer(e), 3),
    "two layers down": lambda e: Around(TokenLayer(e)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_ids_reach_an_embedding_unchanged(form, dtype, policy, said):
    with global_policy.policy_scope(policy):
        embedding = keras.layers.Embedding(70_000, 2)
        model = FORMS[form](embedding)
    # 16 bit rounds this id, but float32 does not.
    ids = np.array([[257, 2049, 60_001]])
    found = model.predict(ids.astype(dtype), verbose=0)
    rows = keras.ops.convert_to_numpy(embedding.embeddings)[ids[0]]
    half = policy.removeprefix("mixed_")
    expected = keras.ops.convert_to_numpy(
        keras.ops.cast(keras.ops.cast(rows, half), "float32")
    )
    np.testing.assert_array_equal(np.reshape(found, (3, 2)), expected)
    assert found.dtype == "float32"
    assert not [line for line in said if "int32" in line]


class Tabular(keras.Model):
    """Normalizes raw features, as in Keras's guide to structured data."""

    def __init__(self, features, form):
        super().__init__()
        layer = keras.layers.Normalization()
        layer.adapt(features)
        self.normalize = {
            "a layer": lambda: layer,
            "functional": lambda: functional(layer, features.shape[1]),
            "sequential": lambda: keras.Sequential([layer]),
        }[form]()
        self.dense = keras.layers.Dense(1, dtype="float32")

    def call(self, x):
        return self.dense(self.normalize(x))


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("form", ["a layer", "functional", "sequential"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_raw_features_reach_a_normalization_unchanged(mode, form, policy):
    # They have three digits more than bfloat16, and exceed float16.
    generator = np.random.default_rng(0)
    x = generator.normal(1e5, 100.0, (64, 4)).astype("float32")
    with global_policy.policy_scope(policy):
        model = Tabular(x, form)
    model.compile("sgd", **steps.settings(mode))
    found = model.predict(x, verbose=0)
    features = (x - x.mean(axis=0)) / x.std(axis=0)
    kernel, bias = map(keras.ops.convert_to_numpy, model.dense.weights)
    np.testing.assert_allclose(found, features @ kernel + bias, atol=0.05)


@keras.saving.register_keras_serializable("exact inputs")
class Sums(keras.Model):
    """Sums its features in a layer that computes in float32."""

    def __init__(self, by_rule, **settings):
        super().__init__(**settings)
        self.by_rule = by_rule
        own = {"name": "in_float32"} if by_rule else {"dtype": "float32"}
        self.sum = keras.layers.Dense(1, kernel_initializer="ones", **own)

    def call(self, x):
        return self.sum(x)

    def get_config(self):
        return {**super().get_config(), "by_rule": self.by_rule}


def loaded(model, tmp_path):
    model.save(tmp_path / "model.keras")
    found = keras.models.load_model(tmp_path / "model.keras")
    found.compile("sgd", "mse")
    return found


def converted(model, tmp_path):
    tfmix.apply_policy(model, "float32")
    rules = [keras.layers.Dense]
    policy = tfmix.Policy("mixed_bfloat16", float32_layers=rules)
    tfmix.apply_policy(model, policy)
    return model


WAYS = {
    "made": lambda model, tmp_path: model,
    "loaded": loaded,
    "converted": converted,
}


@pytest.mark.every_case("each way gives a layer its inputs at another place")
@pytest.mark.parametrize("by_rule", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_float32_layer_sees_exact_inputs_however_it_was_made(
    way, by_rule, tmp_path
):
    rules = ["in_float32"] if by_rule else []
    policy = tfmix.Policy("mixed_bfloat16", float32_layers=rules)
    with tfmix.policy_scope(policy):
        model = Sums(by_rule)
    # bfloat16 rounds both.
    x = np.array([[257.0, 2049.0]], "float32")
    model(x)
    model = WAYS[way](model, tmp_path)
    assert helpers.to_numpy(model(x)).item() == 2306.0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("value", [0.1, -999.0, -1e5])
def test_a_masked_value_need_not_fit_in_16_bit(value, policy):
    with tfmix.policy_scope(policy):
        model = keras.Sequential(
            [
                keras.Input((8, 3)),
                keras.layers.Masking(value),
                keras.layers.GlobalAveragePooling1D(),
            ]
        )
    x = np.random.default_rng(0).normal(size=(4, 8, 3)).astype("float32")
    expected = x[:, :5].mean(axis=1)
    x[:, 5:] = value
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, atol=0.02)


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_lambda_that_falls_back_has_exact_numbers_from_the_first_call(policy):
    import tensorflow as tf

    def mixes(x):
        return keras.ops.sin(x * tf.constant(9e4))

    x = np.random.default_rng(0).uniform(size=(8, 4)).astype("float32")
    tfmix.set_global_policy(policy)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(mixes)])
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, np.sin(x * np.float32(9e4)), atol=0.01)


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_spectral_norm_rounds_no_kernel(policy):
    tfmix.set_global_policy(policy)
    dense = keras.layers.Dense(16)
    layer = keras.layers.SpectralNormalization(dense)
    model = keras.Sequential([keras.Input((8,)), layer])
    for _ in range(20):
        model(np.ones((2, 8), "float32"), training=True)
    kernel = helpers.to_numpy(dense.kernel)
    assert np.mean(kernel != kernel.astype("float16")) > 0.5
    assert dense.compute_dtype == policy.removeprefix("mixed_")
    np.testing.assert_allclose(np.linalg.norm(kernel, 2), 1.0, atol=0.1)
