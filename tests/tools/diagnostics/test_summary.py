"""The table of each layer's dtypes."""

import dataclasses

import keras
import pytest

import tfmix
from tests import helpers
from tests.conversion import test_convert


def names(model):
    return [row.layer.split("/")[-1] for row in tfmix.summary(model).rows]


def test_a_row_has_a_layers_dtypes_and_fits_in_eighty_columns():
    model = test_convert.functional()
    tfmix.apply_policy(model, "mixed_float16")
    report = tfmix.summary(model)
    half = ("mixed_float16", "float16", "float32", "float16")
    assert [dataclasses.astuple(row) for row in report.rows] == [
        ("body", "Dense", *half),
        ("head", "Dense", *["float32"] * 4),
    ]
    lines = str(report).splitlines()
    assert lines[0] == "1 of 2 layers compute in 16 bit"
    assert max(map(len, lines)) <= 80
    assert repr(report) == "<ModelSummary 1 of 2 layers compute in 16 bit>"
    assert "mixed_float16" in helpers.notebook_html(report)


def test_a_layer_needs_no_policy_of_tfmix_and_no_first_call():
    layer = keras.layers.Dense(2, dtype="mixed_bfloat16")
    (row,) = tfmix.summary(keras.Sequential([layer])).rows
    assert (row.policy, row.compute) == ("mixed_bfloat16", "bfloat16")
    assert row.output == ""


def test_each_layer_inside_has_one_row_in_the_models_order():
    assert names(test_convert.nested()) == ["body", "middle", "head"]
    assert len(names(test_convert.shared())) == 3
    first, second = (
        keras.Sequential(
            [keras.layers.Dense(2, name=f"{n}a"), keras.layers.ReLU(name=n)]
        )
        for n in "12"
    )
    model = keras.Sequential([keras.Input((2,)), first, second])
    assert names(model) == ["1a", "1", "2a", "2"]


def test_an_entry_of_a_map_is_shown_not_the_map():
    policies = keras.dtype_policies.DTypePolicyMap(
        default_policy="mixed_float16"
    )
    policies["head"] = keras.DTypePolicy("float32")
    with tfmix.policy_scope(policies):
        model = test_convert.functional()
    found = [row.policy for row in tfmix.summary(model).rows]
    assert found == ["mixed_float16", "float32"]


def test_an_argument_that_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match=r"`model` must be .*model=3"):
        tfmix.summary(3)
