"""Layer rules: their allowed items, and the layers that match."""

import keras
import pytest

import tfmix
from tests import helpers
from tfmix.policy import devices, float32_layers


@pytest.mark.parametrize(
    ("item", "name", "path", "expected"),
    [
        (keras.layers.Dense, "x", None, True),
        (keras.layers.Conv2D, "x", None, False),
        ("Dense", "x", None, True),
        ("Den", "x", None, False),
        ("head", "head", None, True),
        ("head", "head_1", None, False),
        (".*head.*", "my_head_1", None, True),
        ("net/.*", "x", "net/x", True),
        ("net/.*", "x", None, False),
        ("net", "x", "net/x", False),
    ],
)
def test_an_item_matches_class_name_or_whole_path(item, name, path, expected):
    assert (
        float32_layers.matches(item, keras.layers.Dense, name, path) is expected
    )


@pytest.mark.parametrize(
    "name", ["GroupQueryAttention", "AvgPool2D", "Convolution2D"]
)
def test_a_layer_matches_every_name_that_keras_exports(name):
    layer_class = getattr(keras.layers, name)
    assert layer_class.__name__ != name
    assert float32_layers.matches(name, layer_class, "x")
    assert not float32_layers.matches(name, keras.layers.Dense, "x")


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ("Dense", TypeError, "must be a list"),
        (keras.layers.Dense, TypeError, "must be a list"),
        ([7], TypeError, "Received: 7 of type int"),
        ([int], TypeError, "must be a Keras layer"),
        (["head["], ValueError, "'head\\['"),
        ([keras.layers.Dense(1)], TypeError, "Name its class or its name"),
    ],
)
def test_wrong_items_are_refused(items, error, message):
    with pytest.raises(error, match=message):
        float32_layers.resolve(items)


def test_defaults_can_be_extended():
    extended = float32_layers.default_float32_layers(add=["mine", "Softmax"])
    defaults = float32_layers.default_float32_layers()
    assert extended == [*defaults, "mine"]


def test_every_default_layer_has_a_reason():
    assert all(float32_layers.DEFAULT_LAYERS.values())


def test_only_expressions_need_a_path():
    assert float32_layers.needs_path(["net/.*"])
    assert not float32_layers.needs_path(
        ["Softmax", "head", keras.layers.Dense]
    )


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("kind", ["CPU", "GPU"])
def test_max_pooling_of_volumes_is_float32_without_a_kernel(kind, monkeypatch):
    listed = (devices.describe(kind, "one", "tensorflow"),)
    monkeypatch.setattr(devices, "devices", lambda: listed)
    expected = {"CPU": "float32", "GPU": "float16"}[kind]
    with tfmix.policy_scope("mixed_float16"):
        pooling = keras.layers.MaxPooling3D()
        assert pooling.compute_dtype == expected
        assert keras.layers.MaxPooling2D().compute_dtype == "float16"
    with tfmix.policy_scope("mixed_bfloat16"):
        assert keras.layers.MaxPooling3D().compute_dtype == "bfloat16"
