"""A nested model made in 16 bit passes float32 on after its conversion."""

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix._keras import layer_policies
from tfmix.conversion import convert

OFFSET = 2000.0


def build():
    """Makes a model with an inner one that normalizes a feature near 2000."""
    keras.config.set_dtype_policy("mixed_float16")
    inner = keras.Sequential(
        [keras.layers.LayerNormalization(), keras.layers.Dense(4)]
    )
    outer = [keras.Input((8,)), keras.layers.Rescaling(1.0, OFFSET), inner]
    return keras.Sequential(outer)


def plain_float32(model, x):
    keras.config.set_dtype_policy("float32")
    other = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Rescaling(1.0, OFFSET),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(4),
        ]
    )
    other.set_weights(model.get_weights())
    return other.predict(x, verbose=0)


@pytest.mark.costly
def test_a_model_converted_to_float32_computes_in_float32(tmp_path):
    model = build()
    x = np.random.default_rng(0).normal(size=(6, 8)).astype("float32")
    rounded = model.predict(x, verbose=0)
    report = convert.apply_policy(model, "float32")
    expected = plain_float32(model, x)
    helpers.assert_close(model.predict(x, verbose=0), expected, "float32")
    model.save(tmp_path / "converted.keras")
    loaded = keras.saving.load_model(tmp_path / "converted.keras")
    helpers.assert_close(loaded.predict(x, verbose=0), expected, "float32")
    report.undo()
    # A feature of 2000 keeps no decimal place in float16.
    assert np.abs(rounded - expected).max() > 0.01
    helpers.assert_same_bits(model.predict(x, verbose=0), rounded)


def test_only_16_bit_inputs_of_nested_models_are_touched():
    inner = build().layers[-1]
    before = inner._functional._inputs[0].dtype
    restore = layer_policies.widen_inputs(inner)
    assert inner._functional._inputs[0].dtype == "float32"
    restore()
    assert inner._functional._inputs[0].dtype == before == "float16"
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, keras.layers.Embedding(5, 2)(ids))
    layer_policies.widen_inputs(model)
    assert model.input.dtype == "int32"
    layer_policies.widen_inputs(keras.layers.Dense(2))
