"""Conversions of existing models: they train, are reported and are undone."""

import io
import re

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix._keras import layers
from tfmix.autocast import global_policy
from tfmix.conversion import convert
from tfmix.loss_scaling import optimizer as scaling
from tfmix.loss_scaling import rules, train_step_guard
from tfmix.optimizers import master_weights
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
    model.compile(optimizer, "sparse_categorical_crossentropy")
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


@pytest.mark.costly
@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_used_model_computes_in_16_bit_after_conversion(kind, policy):
    model = compiled(kind())
    before = predict(model)
    weights = model.get_weights()
    report = convert.apply_policy(model, policy)
    after = predict(model)
    dtype = report.policy.compute_dtype
    assert layer(model, "body").compute_dtype == dtype
    assert layer(model, "head").compute_dtype == "float32"
    assert matmul_dtypes(model) == {dtype, "float32"}
    assert after.dtype == np.float32
    tolerance = helpers.TOLERANCES[dtype]
    np.testing.assert_allclose(after, before, atol=tolerance)
    assert (after != before).any(), "the traced function is the old one"
    for now, then in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)
    report.undo()
    np.testing.assert_array_equal(predict(model), before)
    assert matmul_dtypes(model) == {"float32"}


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_model_trains_on_and_comes_back(kind):
    model = compiled(kind(), keras.optimizers.Adam(0.01))
    adam = model.optimizer
    model.fit(X, Y, verbose=0)
    report = convert.apply_policy(model, "mixed_float16")
    assert type(model.optimizer) is scaling.LossScaleOptimizer
    assert model.optimizer.inner_optimizer is adam
    assert train_step_guard.is_guarded(model)
    before = model.get_weights()
    model.optimizer.loss_scale = 128.0
    model.fit(X, Y, verbose=0)
    assert int(model.optimizer.iterations) == 2
    assert any(
        (now != then).any()
        for now, then in zip(model.get_weights(), before, strict=True)
    )
    trained = model.get_weights()
    report.undo()
    assert model.optimizer is adam
    assert not train_step_guard.is_guarded(model)
    for now, then in zip(model.get_weights(), trained, strict=True):
        np.testing.assert_array_equal(now, then)
    model.fit(X, Y, verbose=0)
    assert int(adam.iterations) == 3


@pytest.mark.costly
@pytest.mark.parametrize("way", ["apply_policy", "convert_model"])
@pytest.mark.filterwarnings("ignore:.* does not have a .quantize. method")
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_model_is_quantized_once_it_is_float32(kind, way):
    with global_policy.policy_scope("mixed_float16"):
        model = compiled(kind())
    model.fit(X, Y, verbose=0)
    if way == "apply_policy":
        convert.apply_policy(model, "float32")
    else:
        model = convert.convert_model(model, "float32")
    policies = {x.dtype_policy.name for x in model._flatten_layers()}
    assert policies == {"float32"}
    before = predict(model)
    model.quantize("int8")
    assert layer(model, "body").kernel.dtype == "int8"
    np.testing.assert_allclose(predict(model), before, atol=0.05)


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_get_the_policy_of_a_conversion_and_come_back(kind):
    model = kind()
    report = convert.apply_policy(model, "mixed_bfloat16")
    inputs = [x for x in model._flatten_layers() if layers.is_input(x)]
    assert all(x.dtype_policy.name == "mixed_bfloat16" for x in inputs)
    # Inputs do not cast: the next layer casts its own inputs.
    assert all(x.dtype == "float32" for x in inputs)
    report.undo()
    assert all(x.dtype_policy.name == "float32" for x in inputs)


@pytest.mark.filterwarnings("ignore:.* does not have a .quantize. method")
def test_a_conversion_is_not_undone_over_a_quantization():
    with global_policy.policy_scope("mixed_float16"):
        model = functional()
    report = convert.apply_policy(model, "float32")
    model.quantize("int8")
    before = predict(model)
    with pytest.raises(RuntimeError, match="'body' was quantized after"):
        report.undo()
    np.testing.assert_array_equal(predict(model), before)


def test_undo_leaves_nothing_of_tfmix_on_the_model():
    model = compiled(nested())
    names = {id(x): set(vars(x)) for x in model._flatten_layers()}
    policy_of = {id(x): x.dtype_policy for x in model._flatten_layers()}
    convert.apply_policy(model, "mixed_float16").undo()
    for x in model._flatten_layers():
        assert set(vars(x)) == names[id(x)], x.name
        assert x.dtype_policy is policy_of[id(x)]


def test_conversions_are_undone_one_by_one():
    model = functional()
    first = convert.apply_policy(model, "mixed_float16")
    second = convert.apply_policy(model, "mixed_bfloat16")
    body = layer(model, "body")
    assert body.compute_dtype == "bfloat16"
    second.undo()
    assert body.compute_dtype == "float16"
    first.undo()
    assert body.compute_dtype == "float32"
    with pytest.raises(RuntimeError, match="undone already"):
        first.undo()


def test_a_converted_model_that_is_compiled_later_is_wrapped():
    model = functional()
    convert.apply_policy(model, "mixed_float16")
    compiled(model, "adam")
    assert type(model.optimizer) is scaling.LossScaleOptimizer
    assert train_step_guard.is_guarded(model)


def test_the_report_has_one_row_per_layer_with_a_reason():
    report = convert.apply_policy(nested(), "mixed_float16")
    rows = {row.layer.split("/")[-1]: row for row in report.rows}
    assert set(rows) == {"body", "middle", "head"}
    assert len(rows) == len(report.rows)
    assert rows["body"].layer_class == "Dense"
    assert rows["body"].before == "float32"
    assert rows["body"].after == "mixed_float16"
    assert rows["middle"].after == rows["head"].after == "float32"
    assert "softmax head" in rows["head"].why
    assert {row.layer.split("/")[-1] for row in report.kept} == {
        "middle",
        "head",
    }
    assert all(row.why for row in report.rows)


def test_the_report_prints_in_every_form():
    from rich import console

    report = convert.apply_policy(functional(), "mixed_float16")
    text = str(report)
    assert "2 layers under mixed_float16: 1 changed, 1 in float32" in text
    assert "softmax head" in text
    assert "body" in helpers.notebook_html(report)
    shown = io.StringIO()
    console.Console(width=120, file=shown).print(report)
    assert "body" in shown.getvalue()
    assert "2 layers" in repr(report)


def test_the_report_counts_each_layer_once():
    model = functional()
    convert.apply_policy(model, "mixed_float16")
    report = convert.apply_policy(model, "float32")
    assert "2 layers under float32: 1 changed, 2 in float32" in str(report)


def test_a_second_conversion_is_reported_as_no_change():
    model = functional()
    convert.apply_policy(model, "mixed_float16")
    again = convert.apply_policy(model, "mixed_float16")
    assert "mixed_float16 already" in again.notes[0]
    assert "mixed_float16 already" in str(again)
    assert not convert.apply_policy(model, "mixed_bfloat16").notes


def test_a_rule_that_matches_nothing_is_reported():
    policy = policies.Policy("mixed_float16", float32_layers=["boddy"])
    report = convert.apply_policy(functional(), policy)
    assert "'boddy'" in report.notes[0]


@pytest.mark.parametrize("rule", ["body", ".*ody", keras.layers.Dense])
def test_rules_of_the_policy_are_applied(rule):
    model = functional()
    policy = policies.Policy("mixed_float16", float32_layers=[rule])
    convert.apply_policy(model, policy)
    assert layer(model, "body").compute_dtype == "float32"


@pytest.mark.costly
def test_a_linear_output_is_float32():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4),
            keras.layers.Dense(1, name="head"),
        ]
    )
    report = convert.apply_policy(model, "mixed_float16")
    assert predict(model).dtype == np.float32
    assert report.rows[-1].why == "the model's output"


def test_every_output_of_several_is_float32():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(4, name="body")(inputs)
    outputs = [keras.layers.Dense(1)(x), keras.layers.Dense(2)(x)]
    model = keras.Model(inputs, outputs)
    convert.apply_policy(model, "mixed_float16")
    assert [out.dtype for out in predict(model)] == [np.float32] * 2
    assert [out.dtype for out in model.outputs] == ["float32"] * 2
    assert layer(model, "body").output.dtype == "float16"


def test_a_nested_models_output_has_the_dtype_of_its_last_layer():
    backbone = keras.Sequential(
        [
            keras.Input((6, 2)),
            keras.layers.Dense(4),
            keras.layers.GlobalAveragePooling1D(),
        ],
        name="back",
    )
    inputs = keras.Input((6, 2))
    model = keras.Model(inputs, keras.layers.Dense(1)(backbone(inputs)))
    report = convert.apply_policy(model, "mixed_float16")
    assert backbone.layers[0].output.dtype == "float16"
    assert layer(model, "back")._inbound_nodes[-1].outputs[0].dtype == "float32"
    report.undo()
    assert backbone.layers[0].output.dtype == "float32"


def test_back_to_float32_by_policy():
    model = nested()
    before = predict(model)
    convert.apply_policy(model, "mixed_float16")
    convert.apply_policy(model, "float32")
    np.testing.assert_array_equal(predict(model), before)


def test_a_float32_layer_in_a_mixed_model_was_chosen_and_stays():
    with global_policy.policy_scope("mixed_bfloat16"):
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, name="body"),
                keras.layers.Dense(4, dtype="float32", name="own"),
                keras.layers.Dense(3),
            ]
        )
    report = convert.apply_policy(model, "mixed_float16")
    rows = {row.layer.split("/")[-1]: row for row in report.rows}
    assert rows["body"].after == "mixed_float16"
    assert rows["own"].after == "float32"
    assert rows["own"].why == "has its own dtype"


@helpers.requires_backend("tensorflow")
def test_layers_of_integer_and_double_dtypes_do_not_change():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, dtype="float64", name="double"),
            keras.layers.Dense(3),
        ]
    )
    convert.apply_policy(model, "mixed_float16")
    assert layer(model, "double").compute_dtype == "float64"


def test_a_map_decides_per_layer():
    policy = keras.dtype_policies.DTypePolicyMap(
        keras.DTypePolicy("mixed_bfloat16"),
        {"body": keras.DTypePolicy("mixed_float16")},
    )
    model = nested()
    convert.apply_policy(model, policy)
    mixed = functional()
    convert.apply_policy(mixed, policy)
    assert layer(mixed, "body").compute_dtype == "float16"
    assert type(layer(mixed, "body").dtype_policy) is keras.DTypePolicy


@pytest.mark.costly
def test_parts_of_attention_and_recurrent_layers_follow_them():
    inputs = keras.Input((4, 6))
    x = keras.layers.MultiHeadAttention(2, 3)(inputs, inputs)
    x = keras.layers.Bidirectional(keras.layers.LSTM(2))(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    convert.apply_policy(model, "mixed_float16")
    dtypes = {x.name: x.compute_dtype for x in model._flatten_layers()}
    sixteen = {name for name, dtype in dtypes.items() if dtype == "float16"}
    assert {"query", "softmax"} <= sixteen
    assert any("lstm_cell" in name for name in sixteen)


def test_op_rules_belong_to_the_model():
    class Norm(keras.layers.Layer):
        def call(self, x):
            return keras.ops.norm(x, axis=-1, keepdims=True)

    inputs = keras.Input((6,))
    outputs = keras.layers.Activation("linear")(Norm()(inputs))
    model = keras.Model(inputs, outputs)
    big = X * 0 + 3000.0
    expected = model.predict(big, verbose=0)
    report = convert.apply_policy(model, "mixed_float16")
    result = model.predict(big, verbose=0)
    np.testing.assert_allclose(result, expected, rtol=2.0**-10)
    assert report.rows[0].after == "mixed_float16"


@pytest.mark.costly
def test_float_ids_of_a_converted_model_find_their_rows():
    class Ids(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(4000, 1)

        def call(self, x):
            return self.embedding(x)

    model = Ids()
    ids = np.array([[2049.0, 3001.0]], "float32")
    model(ids)
    model.embedding.set_weights([np.arange(4000.0)[:, None] % 2048])
    report = convert.apply_policy(model, "mixed_float16")
    result = keras.ops.convert_to_numpy(model(ids)).ravel()
    np.testing.assert_array_equal(result, (ids % 2048).ravel())
    report.undo()
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(model(ids)).ravel(), (ids % 2048).ravel()
    )


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_pure_16_bit_casts_the_variables_and_undo_restores_their_bits(policy):
    model = sequential()
    before = predict(model)
    weights = model.get_weights()
    report = convert.apply_policy(model, policy)
    dtypes = {x.name: {v.dtype for v in x.weights} for x in model.layers}
    assert dtypes["body"] == {policy}
    assert dtypes["head"] == {"float32"}
    # The moving statistics would lose their small updates.
    assert {"float32"} in dtypes.values()
    np.testing.assert_allclose(
        predict(model), before, atol=helpers.TOLERANCES[policy]
    )
    report.undo()
    for now, then in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)
    np.testing.assert_array_equal(predict(model), before)


@pytest.mark.costly
def test_a_compiled_model_converted_to_pure_16_bit_trains_masters():
    model = compiled(functional(), keras.optimizers.Adam(0.01))
    model.fit(X, Y, verbose=0)
    convert.apply_policy(model, "float16")
    inner = model.optimizer.inner_optimizer
    assert type(inner) is master_weights.MasterWeightOptimizer
    model.optimizer.loss_scale = 128.0
    model.fit(X, Y, verbose=0)
    assert model.optimizer.skipped_steps == 0
    assert {v.dtype for v in layer(model, "body").weights} == {"float16"}


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_converted_and_the_source_untouched(kind):
    model = compiled(kind())
    before = predict(model)
    twin = convert.convert_model(model, "mixed_float16")
    assert twin is not model
    assert type(twin) is type(model)
    assert layer(twin, "body").compute_dtype == "float16"
    assert layer(model, "body").compute_dtype == "float32"
    for mine, theirs in zip(twin.weights, model.weights, strict=True):
        assert mine is not theirs
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(predict(model), before)
    np.testing.assert_allclose(
        predict(twin), before, atol=helpers.TOLERANCES["float16"]
    )


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["float16", "bfloat16", *MIXED])
def test_a_copy_for_inference_only_predicts(policy, tmp_path):
    model = compiled(functional(), "adam")
    model.fit(X, Y, verbose=0)
    twin = convert.convert_model(model, policy, inference=True)
    assert not twin.compiled
    assert not twin.trainable_variables
    assert twin.optimizer is None
    body = layer(twin, "body")
    assert body.compute_dtype == body.dtype_policy.compute_dtype
    np.testing.assert_allclose(
        predict(twin),
        predict(model),
        atol=helpers.TOLERANCES[body.compute_dtype],
    )
    twin.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(predict(loaded), predict(twin))


def test_a_model_that_cannot_be_copied_gets_advice_to_convert_in_place():
    class NoConfig(keras.Model):
        def __init__(self, needed):
            super().__init__()
            self.dense = keras.layers.Dense(needed)

        def call(self, x):
            return self.dense(x)

    model = NoConfig(2)
    model(X)
    with pytest.raises(TypeError, match=r"apply_policy\(model, policy\)"):
        convert.convert_model(model, "mixed_float16")


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
    assert train_step_guard.is_guarded(model) == scaled


@pytest.mark.parametrize("keep", [True, False])
def test_prepare_lets_batch_normalisation_be_chosen(keep):
    model, _, report = convert.prepare(
        sequential(), "sgd", keep_batchnorm_fp32=keep
    )
    (row,) = [r for r in report.rows if r.layer_class == "BatchNormalization"]
    assert (row.after == "float32") == keep


def test_prepare_refuses_keep_batchnorm_with_a_policy_object():
    policy = policies.Policy("mixed_float16")
    with pytest.raises(ValueError, match="Pass it to the Policy"):
        convert.prepare(sequential(), "sgd", policy, keep_batchnorm_fp32=True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "must be a Keras 3 model"),
        (keras.layers.Dense(1), "Put the layer into a model"),
    ],
)
def test_an_argument_that_is_not_a_model_is_refused(model, message):
    for function in (convert.apply_policy, convert.convert_model):
        with pytest.raises(TypeError, match=message):
            function(model, "mixed_float16")


def test_a_wrong_policy_leaves_the_model_as_it_was():
    model = functional()
    with pytest.raises(ValueError, match="Did you mean 'mixed_float16'"):
        convert.apply_policy(model, "fp16")
    assert layer(model, "body").compute_dtype == "float32"


def test_a_copy_contains_lambda_layers():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Lambda(lambda x: 2 * x),
            keras.layers.Dense(2),
        ]
    )
    twin = convert.convert_model(model, "mixed_bfloat16")
    assert twin.layers[0].compute_dtype == "bfloat16"
    x = np.ones((1, 4), "float32")
    helpers.assert_close(twin(x), model(x), "bfloat16")


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


def ends_in_ops(x):
    return keras.ops.softmax(keras.layers.Dense(3, name="head")(x))


def ends_in_a_cast(x):
    return keras.ops.cast(keras.layers.Dense(3, name="head")(x), "float32")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("end", "head"), [(ends_in_ops, "float32"), (ends_in_a_cast, "float16")]
)
def test_an_output_computed_by_ops_is_float32(end, head):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, name="body")(inputs)
    x = keras.ops.relu(x) + keras.ops.mean(x, axis=-1, keepdims=True)
    model = keras.Model(inputs, end(x))
    before = predict(model)
    report = convert.apply_policy(model, "mixed_float16")
    assert layer(model, "body").compute_dtype == "float16"
    # If the user casts the output, the layer needs no float32 matmul.
    assert layer(model, "head").compute_dtype == head
    after = predict(model)
    assert after.dtype == np.float32
    np.testing.assert_allclose(
        after, before, atol=helpers.TOLERANCES["float16"]
    )
    report.undo()
    np.testing.assert_array_equal(predict(model), before)
