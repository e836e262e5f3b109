"""Converted models: what each layer computes in, and what the report says."""

import re

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix._keras import layers
from tfmix.autocast import global_policy
from tfmix.conversion import convert
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules
from tfmix.policy import policy as policies

MIXED = ["mixed_float16", "mixed_bfloat16"]
X = np.random.default_rng(5).normal(size=(8, 6)).astype("float32")
Y = np.arange(8) % 3


def functional():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="relu", name="body")(inputs)
    outputs = keras.layers.Dense(3, activation="softmax", name="head")(x)
    return keras.Model(inputs, outputs)


def sequential():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, name="body"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3, activation="softmax", name="head"),
        ]
    )


def nested():
    backbone = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, name="body")], name="back"
    )
    inputs = keras.Input((6,))
    x = keras.layers.Softmax(name="middle")(backbone(inputs))
    outputs = keras.layers.Dense(3, activation="softmax", name="head")(x)
    return keras.Model(inputs, outputs)


def shared():
    inputs = keras.Input((6,))
    layer = keras.layers.Dense(6, name="body")
    x = layer(keras.layers.Dropout(0.0)(layer(inputs)))
    outputs = keras.layers.Dense(3, activation="softmax", name="head")(x)
    return keras.Model(inputs, outputs)


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    def __init__(self, units=8, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.body = keras.layers.Dense(units, name="body")
        self.head = keras.layers.Dense(3, activation="softmax", name="head")

    def call(self, x):
        return self.head(self.body(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def subclassed():
    model = Subclassed()
    model(X)
    return model


KINDS = [functional, sequential, nested, shared, subclassed]


def layer(model, name):
    (found,) = [x for x in model._flatten_layers() if x.name == name]
    return found


def compiled(model, optimizer="sgd"):
    # XLA would compile for longer than all else takes; JAX has to.
    jit = keras.backend.backend() == "jax"
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, jit_compile=jit)
    return model


def predict(model):
    return model.predict(X, verbose=0)


def matmul_dtypes(model):
    """Returns the dtypes of the matrix products in the model's graph."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        traced = tf.function(lambda x: model(x, training=False))
        graph = traced.get_concrete_function(tf.constant(X)).graph
        found = [op for op in graph.get_operations() if op.type == "MatMul"]
        return {op.outputs[0].dtype.name for op in found}
    import jax

    text = jax.jit(lambda x: model(x, training=False)).lower(X).as_text()
    # The dtypes of the factors count: float16 products may be summed and
    # returned in float32.
    found = re.findall(r"dot_general.* : \(tensor<\w*x(\w+)>", text)
    names = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
    return {names[dtype] for dtype in found}


def close(found, expected, dtype):
    """Returns whether probabilities differ by roundings, and do differ."""
    assert found.dtype == np.float32
    return 0 < np.abs(found - expected).max() <= helpers.TOLERANCES[dtype]


@pytest.mark.costly
@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_used_model_computes_in_16_bit_until_undo(kind, policy):
    model = compiled(kind())
    before, weights = predict(model), model.get_weights()
    every = model._flatten_layers()
    attributes = [(x, x.dtype_policy, set(vars(x))) for x in every]
    report = convert.apply_policy(model, policy)
    dtype = report.policy.compute_dtype
    assert layer(model, "body").compute_dtype == dtype
    assert layer(model, "head").compute_dtype == "float32"
    inputs = [x for x in model._flatten_layers() if layers.is_input(x)]
    assert all(x.dtype_policy.name == policy for x in inputs)
    # Inputs do not cast: the next layer casts its own inputs.
    assert all(x.dtype == "float32" for x in inputs)
    assert matmul_dtypes(model) == {dtype, "float32"}
    assert close(predict(model), before, dtype)
    for now, then in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)
    report.undo()
    np.testing.assert_array_equal(predict(model), before)
    assert matmul_dtypes(model) == {"float32"}
    for x, its_policy, names in attributes:
        assert x.dtype_policy is its_policy
        assert set(vars(x)) == names, x.name


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize(
    ("made", "policy"), [("float32", "bfloat16"), ("float16", "float32")]
)
def test_a_conversion_in_place_casts_no_variables(made, policy, built):
    with global_policy.policy_scope(made):
        model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    if built:
        model.build((None, 6))
    with pytest.raises(ValueError, match=rf"become {policy} instead of {made}"):
        convert.apply_policy(model, policy)
    assert model.layers[0].dtype_policy.name == made
    copy = convert.convert_model(model, policy)
    copy(X)
    assert copy.layers[0].kernel.dtype == policy


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_pure_16_bit_casts_all_variables_but_heads_and_statistics(policy):
    model = sequential()
    before = predict(model)
    model = convert.convert_model(model, policy)
    body, norm, head = model.layers
    assert {v.dtype for v in body.weights} == {policy}
    # The moving statistics would lose their small updates.
    kept = [norm.moving_mean, norm.moving_variance, *head.weights]
    assert {v.dtype for v in kept} == {"float32"}
    assert close(predict(model), before, policy)


# Each function makes a model of a body and a head, in one of several ways.


def linear(**head):
    body = keras.layers.Dense(4, name="body")
    parts = [body, keras.layers.Dense(1, name="head", **head)]
    return keras.Sequential([keras.Input((6,)), *parts])


def with_ops(end):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, name="body")(inputs)
    x = keras.ops.relu(x) + keras.ops.mean(x, axis=-1, keepdims=True)
    return keras.Model(inputs, end(keras.layers.Dense(3, name="head")(x)))


def ends_in_ops():
    return with_ops(keras.ops.softmax)


def ends_in_a_cast():
    return with_ops(lambda x: keras.ops.cast(x, "float32"))


def partly_in_16_bit():
    with global_policy.policy_scope("mixed_bfloat16"):
        model = linear(dtype="float32")
        model.add(keras.layers.Dense(3))
        return model


def a_map():
    return keras.dtype_policies.DTypePolicyMap(
        keras.DTypePolicy("mixed_bfloat16"),
        {"body": keras.DTypePolicy("mixed_float16")},
    )


def rule(*items):
    return policies.Policy("mixed_float16", float32_layers=items)


@pytest.mark.every_case("each is a rule of its own, and fast")
@pytest.mark.parametrize(
    ("make", "policy", "body", "head", "why"),
    [
        (functional, rule("body"), "float32", "float32", "softmax head"),
        (functional, rule(".*ody"), "float32", "float32", "softmax head"),
        (functional, rule(keras.layers.Dense), "float32", "float32", "Dense"),
        (functional, a_map(), "float16", "float32", "softmax head"),
        (linear, MIXED[0], "float16", "float32", "the model's output"),
        (ends_in_ops, MIXED[0], "float16", "float32", "the model's output"),
        # If the user casts the output, the layer needs no float32 product.
        (ends_in_a_cast, MIXED[0], "float16", "float16", "computes in"),
        # In a model with 16-bit layers, a float32 layer was chosen.
        (partly_in_16_bit, MIXED[0], "float16", "float32", "its own dtype"),
    ],
)
def test_a_layers_dtype_has_a_reason(make, policy, body, head, why):
    model = make()
    before = predict(model)
    report = convert.apply_policy(model, policy)
    assert layer(model, "body").compute_dtype == body
    assert layer(model, "head").compute_dtype == head
    assert type(layer(model, "body").dtype_policy) is keras.DTypePolicy
    rows = {row.layer.split("/")[-1]: row for row in report.rows}
    assert why in rows["head"].why
    after = predict(model)
    assert after.dtype == "float32"
    dtype = "bfloat16" if make is partly_in_16_bit else "float16"
    tolerance = helpers.TOLERANCES[dtype]
    np.testing.assert_allclose(after, before, atol=tolerance)


def test_the_dtypes_of_symbolic_results_follow():
    backbone = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(4)],
        name="back",
    )
    inputs = keras.Input((6,))
    hidden = backbone(inputs)
    results = [keras.layers.Dense(1)(hidden), keras.layers.Softmax()(hidden)]
    model = keras.Model(inputs, results)
    report = convert.apply_policy(model, "mixed_float16")
    assert [out.dtype for out in predict(model)] == [np.float32] * 2
    assert [out.dtype for out in model.outputs] == ["float32"] * 2
    nested = [*layer(model, "back")._inbound_nodes[-1].outputs]
    assert backbone.layers[0].output.dtype == nested[0].dtype == "float16"
    report.undo()
    nested = [*layer(model, "back")._inbound_nodes[-1].outputs]
    assert backbone.layers[0].output.dtype == nested[0].dtype == "float32"


def test_the_report_has_one_row_per_layer_with_a_reason():
    report = convert.apply_policy(nested(), "mixed_float16")
    found = [
        (row.layer.split("/")[-1], row.layer_class, row.before, row.after)
        for row in report.rows
    ]
    assert found == [
        ("body", "Dense", "float32", "mixed_float16"),
        ("middle", "Softmax", "float32", "float32"),
        ("head", "Dense", "float32", "float32"),
    ]
    assert report.kept == report.rows[1:]
    assert all(row.why for row in report.rows)
    text = str(report)
    assert "3 layers under mixed_float16: 1 changed, 2 in float32" in text
    assert "softmax head" in text
    assert "body" in helpers.notebook_html(report)
    assert "3 layers" in repr(report)


def test_notes_say_what_had_no_effect():
    model = functional()
    report = convert.apply_policy(model, rule("boddy"))
    assert "'boddy'" in report.notes[0]
    again = convert.apply_policy(model, "mixed_float16")
    assert "No layer changes" in again.notes[0]
    assert "No layer changes" in str(again)
    assert not convert.apply_policy(model, "mixed_bfloat16").notes
    back = convert.apply_policy(model, "float32")
    assert "2 layers under float32: 1 changed, 2 in float32" in str(back)


@pytest.mark.parametrize(
    ("level", "dtype", "rule"),
    [
        ("O0", "float32", None),
        ("O1", "float16", rules.DynamicLossScale),
        ("O2", "float16", rules.DynamicLossScale),
        ("O3", "float16", rules.NoLossScale),
        ("mixed_bfloat16", "bfloat16", rules.NoLossScale),
    ],
)
def test_prepare_converts_wraps_and_guards(level, dtype, rule):
    model, optimizer, report = convert.prepare(sequential(), "adam", level)
    assert layer(model, "body").compute_dtype == dtype
    assert report.rows
    scaled = isinstance(optimizer, scaling.LossScaleOptimizer)
    assert scaled == (rule is not None)
    if scaled:
        assert type(optimizer.rule) is rule
    model.compile(optimizer, "sparse_categorical_crossentropy")
    assert model.optimizer is optimizer
    assert helpers.is_guarded(model) == scaled
    if level == "O3":
        with pytest.raises(RuntimeError, match="made a copy"):
            report.undo()


@pytest.mark.parametrize("keep", [True, False])
def test_prepare_lets_batch_normalisation_be_chosen(keep):
    others = policies.Policy.default_float32_layers()
    chosen = policies.Policy("O2", float32_layers=others)
    _, _, report = convert.prepare(
        sequential(), "sgd", "O2" if keep else chosen
    )
    (row,) = [r for r in report.rows if r.layer_class == "BatchNormalization"]
    assert (row.after == "float32") == keep


def no_model():
    return None


def a_layer():
    return keras.layers.Dense(1)


@pytest.mark.every_case("each is a message of its own, and fast")
@pytest.mark.parametrize(
    ("function", "make", "policy", "message"),
    [
        (convert.apply_policy, no_model, MIXED[0], "must be a Keras 3 model"),
        (convert.convert_model, no_model, MIXED[0], "must be a Keras 3 model"),
        (convert.apply_policy, a_layer, MIXED[0], "Put the layer into a model"),
        (convert.convert_model, a_layer, MIXED[0], "Put the layer into a mod"),
        (convert.apply_policy, functional, "mixed_fp16", "Did you mean 'mixed"),
    ],
)
def test_a_wrong_argument_is_refused_and_changes_nothing(
    function, make, policy, message
):
    model = make()
    error = ValueError if make is functional else TypeError
    with pytest.raises(error, match=message):
        function(model, policy)
    if make is functional:
        assert layer(model, "body").compute_dtype == "float32"


@pytest.mark.costly
def test_a_recurrent_layer_starts_orthogonal_in_pure_bfloat16():
    # Neither backend has a QR decomposition in bfloat16.
    with global_policy.policy_scope("bfloat16"):
        layer = keras.layers.LSTM(4)
        layer.build((None, 3, 2))
    kernel = helpers.to_numpy(layer.cell.recurrent_kernel)
    np.testing.assert_allclose(
        kernel @ kernel.T, np.eye(4), atol=helpers.TOLERANCES["bfloat16"]
    )
