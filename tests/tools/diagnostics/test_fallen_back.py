"""`check` names the layers that fell back to float32."""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests.autocast import test_fallback

X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
Y = X[:, :1]
# The first holds no layer, the second one, and the third a model.
KINDS = (test_fallback.Mixes, test_fallback.Block)


def stack(kind):
    guilty = kind(name="guilty")
    inner = [layers.Dense(8), guilty, layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *inner])


def note_of(report):
    (note,) = [one for one in report.notes if "computes in float32" in one]
    return note


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checked", [None, "mixed_bfloat16"])
def test_a_16_bit_model_has_a_note_on_the_fallback(kind, checked):
    with tfmix.policy_scope("mixed_float16"):
        model = stack(kind)
    report = tfmix.check(model, X, Y, loss="mse", policy=checked)
    assert report.healthy
    if checked is None:
        assert note_of(report).startswith(
            "guilty computes in float32: test_fallback"
        )
        assert "guilty computes in float32" in str(report)
        assert "guilty computes in float32" in report.to_json()
    # `apply_policy` keeps fallbacks as well.
    assert model.layers[1].compute_dtype == "float32"
    assert "guilty" not in str(report.suggested_policy())
