"""Float32 weights go into 16-bit models, and come out of their masters."""

import keras
import numpy as np
import pytest
from keras import ops

from tests import helpers
from tests.optimizers import sixteen_bit
from tfmix.optimizers import float32_weights


def network(*dtypes):
    """Returns a model of a Dense, a BatchNormalization and a Dense."""
    layers = keras.layers.Dense, keras.layers.BatchNormalization
    first, norm, last = dtypes if len(dtypes) > 1 else dtypes * 3
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers[0](16, dtype=first),
            layers[1](dtype=norm),
            layers[0](1, dtype=last),
        ]
    )


def compiled(way, *dtypes):
    model = network(*(dtypes or ["bfloat16"]))
    model.compile(sixteen_bit.WAYS[way](keras.optimizers.AdamW(0.01)), "mse")
    return model


@pytest.mark.costly
def test_float32_weights_go_in_and_come_out_without_loss(tmp_path):
    source, random = network("float32"), np.random.default_rng(3)
    weights = [
        np.abs(random.normal(size=v.shape)).astype("float32")
        for v in source.weights
    ]
    source.set_weights(weights)
    source.save_weights(tmp_path / "float32.weights.h5")
    model, out = compiled("masters"), tmp_path / "out.weights.h5"
    float32_weights.load_float32(model, tmp_path / "float32.weights.h5")
    exported = float32_weights.export_float32(model, out)
    for variable, got, wanted in zip(
        model.weights, exported, weights, strict=True
    ):
        assert got.dtype == np.float32
        if variable.trainable:
            np.testing.assert_array_equal(got, wanted)
            assert variable.dtype == "bfloat16"
    source.load_weights(out)
    for got, wanted in zip(source.get_weights(), exported, strict=True):
        np.testing.assert_array_equal(got, wanted)
    # A list will do as well.
    longer = [value + 0.001 for value in exported]
    float32_weights.load_float32(model, longer)
    (got, *_) = float32_weights.export_float32(model)
    np.testing.assert_array_equal(got, longer[0])


def test_float32_weights_that_do_not_fit_change_nothing():
    model = compiled("masters", "float32", "float32", "bfloat16")
    before = sixteen_bit.bits_of(model.weights)
    weights = [
        helpers.to_numpy(ops.cast(v, "float32")) + 1 for v in model.weights
    ]
    with pytest.raises(ValueError, match="shape"):
        float32_weights.load_float32(model, [*weights[:-1], np.zeros(7)])
    assert sixteen_bit.bits_of(model.weights) == before


def test_a_model_without_float32_weights_is_refused(tmp_path):
    path = tmp_path / "out.weights.h5"
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    for model, error, message in (
        (unbuilt, ValueError, "no weights"),
        (3, TypeError, "model=3"),
    ):
        with pytest.raises(error, match=message):
            float32_weights.export_float32(model, path)
    assert not path.exists()
    with pytest.raises(ValueError, match="Compile"):
        float32_weights.load_float32(network("bfloat16"), [])
