"""The table of each layer's dtypes."""

import keras
import pytest

import tfmix
from tests import helpers
from tests.conversion import test_convert


@keras.saving.register_keras_serializable("tests_summary")
class Mixes(keras.layers.Layer):
    def call(self, x):
        return x + keras.ops.ones_like(x, dtype="float32")[..., :1] * 1e-9


def rows(model):
    return {row.layer.split("/")[-1]: row for row in tfmix.summary(model).rows}


def test_a_row_has_a_layers_compute_variable_and_output_dtypes():
    model = test_convert.functional()
    tfmix.apply_policy(model, "mixed_float16")
    found = tfmix.summary(model).rows
    assert [row.layer_class for row in found] == ["Dense", "Dense"]
    body, head = found
    assert body.layer == "body"
    assert body.policy == "mixed_float16"
    assert (body.compute, body.variables) == ("float16", "float32")
    assert body.output == "float16"
    assert (head.policy, head.compute) == ("float32", "float32")
    assert head.output == "float32"


def test_a_summary_needs_no_policy_of_tfmix():
    plain = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(2, dtype="mixed_bfloat16")]
    )
    (row,) = tfmix.summary(plain).rows
    assert (row.policy, row.compute) == ("mixed_bfloat16", "bfloat16")


def test_each_layer_of_a_nested_or_shared_model_has_one_row():
    nested = rows(test_convert.nested())
    assert list(nested) == ["body", "middle", "head"]
    classes = [
        row.layer_class for row in tfmix.summary(test_convert.shared()).rows
    ]
    assert sorted(classes) == ["Dense", "Dense", "Dropout"]


def test_layers_inside_others_come_in_the_models_order():
    blocks = [
        keras.Sequential(
            [
                keras.layers.Dense(2, name=f"{n}a"),
                keras.layers.ReLU(name=f"{n}b"),
            ]
        )
        for n in (1, 2)
    ]
    model = keras.Sequential([keras.Input((2,)), *blocks])
    assert list(rows(model)) == ["1a", "1b", "2a", "2b"]


def test_the_output_dtype_is_empty_before_the_first_call():
    model = keras.Sequential([keras.layers.Dense(2, name="body")])
    assert rows(model)["body"].output == ""


def test_an_entry_of_a_map_is_shown_not_the_map():
    policies = keras.dtype_policies.DTypePolicyMap(
        default_policy="mixed_float16"
    )
    policies["head"] = keras.DTypePolicy("float32")
    with tfmix.policy_scope(policies):
        model = test_convert.functional()
    found = rows(model)
    assert found["body"].policy == "mixed_float16"
    assert found["head"].policy == "float32"


@helpers.requires_backend("tensorflow")  # JAX can mix dtypes.
def test_a_layer_that_fell_back_is_named_below_with_its_reason():
    with tfmix.policy_scope("mixed_float16"):
        inputs = keras.Input((6,))
        x = Mixes(name="guilty")(keras.layers.Dense(4)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(2)(x))
    report = tfmix.summary(model)
    assert {row.layer: row.compute for row in report.rows}["guilty"] == (
        "float32"
    )
    assert "guilty computes in float32: test_summary.py:" in str(report)


def test_a_summary_prints_in_eighty_columns_and_in_a_notebook():
    model = test_convert.functional()
    tfmix.apply_policy(model, "mixed_float16")
    report = tfmix.summary(model)
    lines = str(report).splitlines()
    assert lines[0] == "1 of 2 layers compute in 16 bit"
    assert max(map(len, lines)) <= 80
    assert repr(report) == "<ModelSummary 1 of 2 layers compute in 16 bit>"
    assert "mixed_float16" in helpers.notebook_html(report)


def test_an_argument_that_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match=r"`model` must be .*model=3"):
        tfmix.summary(3)
