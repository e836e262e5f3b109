"""The policy `mixed_float8`: which layers multiply in float8, and training."""

import json
import pathlib

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers
from tfmix.float8 import chosen_layers, product

datasets = pytest.importorskip("sklearn.datasets")
ALL = ("Dense", "EinsumDense")
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


def policy(*names):
    return tfmix.Policy("mixed_float8", float8_layers=names or ALL)


def reasons(model):
    return {
        layer.name: why for layer, why in chosen_layers.reasons(model).items()
    }


def classifier(rules=None):
    """Returns a small transformer for the 8 x 8 pictures of digits."""
    with tfmix.policy_scope(rules or policy()):
        inputs = keras.Input((64,))
        h = layers.Reshape((4, 16))(inputs)
        h = layers.Dense(32, name="embed")(h)
        attention = layers.MultiHeadAttention(2, 16, name="attention")
        h = layers.LayerNormalization()(h + attention(h, h))
        wide = layers.Dense(64, activation="gelu", name="wide")(h)
        h = layers.LayerNormalization()(h + layers.Dense(32, name="back")(wide))
        outputs = layers.Dense(10, name="head")(layers.Flatten()(h))
        return keras.Model(inputs, outputs)


def digits():
    x, y = datasets.load_digits(return_X_y=True)
    return (x / 16).astype("float32"), y


def fitted(rules, epochs=3, optimizer=None, **how):
    keras.utils.set_random_seed(0)
    model = classifier(rules)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer or keras.optimizers.Adam(3e-3),
        loss=loss,
        **(how or {"jit_compile": not ON_TENSORFLOW}),
    )
    x, y = digits()
    history = model.fit(
        x[:768], y[:768], epochs=epochs, batch_size=128, verbose=0
    )
    return model, history.history["loss"][-1]


def run(model, x):
    return helpers.to_numpy(model(x))


def test_by_default_layers_that_gain_are_chosen_but_the_ends():
    with tfmix.policy_scope("mixed_float8"):
        model = keras.Sequential(
            [
                keras.Input((16,)),
                layers.Dense(2048, name="first"),
                layers.Dense(8192, name="second"),
                layers.Dense(96, name="narrow"),
                layers.Dense(100, name="odd"),
                layers.Dense(4096, dtype="float32", name="wide"),
                layers.Dense(4096, name="last"),
            ]
        )
    model(np.zeros((2, 16), "float32"))
    assert reasons(model) == {
        "first": "the first or the last with a matrix",
        "second": "",
        "narrow": "8192 x 96 is too small to gain",
        "odd": "96 x 100 are not multiples of 16",
        "wide": "computes in float32",
        "last": "the first or the last with a matrix",
    }
    lines = []
    model.summary(print_fn=lines.append)
    assert " second multiplies in float8" in lines


def test_the_first_and_last_layer_may_be_nested():
    names = iter("abcdef")

    def three():
        return keras.Sequential(
            [layers.Dense(4096, name=next(names)) for _ in range(3)]
        )

    with tfmix.policy_scope("mixed_float8"):
        model = keras.Sequential([keras.Input((16,)), three(), three()])
    run(model, np.zeros((2, 16), "float32"))
    found = reasons(model)
    assert [name for name, why in found.items() if not why] == list("bcde")


def test_the_choice_follows_times_on_a_gpu():
    root = pathlib.Path(__file__).parent.parent.parent
    published = root / "docs" / "benchmarks" / "gpu-jax.json"
    (*_, products) = json.loads(published.read_text())["tables"]
    assert len(products["rows"]) == 8
    for row in products["rows"]:
        depth, width = map(int, row["weight"].split(" x "))
        is_faster = row["4096 rows"] > 1
        assert chosen_layers.gains(depth, width) == is_faster, row


@pytest.mark.costly
@pytest.mark.parametrize(
    ("rule", "chosen"),
    [
        ("wide", {"wide"}),
        (".*attention/.*", {"query", "key", "value", "attention_output"}),
    ],
)
def test_layers_are_named_as_in_float32_layers(rule, chosen):
    model = classifier(policy(rule))
    run(model, digits()[0][:4])
    found = reasons(model)
    assert {name for name, why in found.items() if not why} == chosen


def test_a_chosen_layer_computes_the_product_its_bias_and_activation():
    x = np.random.default_rng(0).normal(size=(16, 32)).astype("float32")
    with tfmix.policy_scope(policy()):
        dense = layers.Dense(48, activation="relu", bias_initializer="ones")
        model = keras.Sequential([keras.Input((32,)), dense])
    narrow = [ops.cast(each, "bfloat16") for each in (x, dense.kernel)]
    expected = ops.relu(product.product(*narrow) + 1)
    found = run(model, x)
    np.testing.assert_array_equal(found, helpers.to_numpy(expected))
    with tfmix.policy_scope("mixed_bfloat16"):
        other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    assert not np.array_equal(run(other, x), found)
    np.testing.assert_allclose(run(other, x), found, atol=0.3)


@pytest.mark.slow
def test_a_saved_model_is_a_plain_keras_model(tmp_path):
    model, _ = fitted(policy(), epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "float8" not in str(loaded.get_config())
    assert loaded.get_layer("wide").dtype_policy.name == "mixed_bfloat16"
    assert reasons(loaded) == {}
    for one, other in zip(loaded.weights, model.weights, strict=True):
        helpers.assert_same_bits(one, other)


def test_a_conversion_chooses_layers_and_undo_forgets_them():
    x = digits()[0][:8]
    model = classifier("float32")
    tfmix.apply_policy(model, "mixed_bfloat16")
    before = run(model, x)
    report = tfmix.apply_policy(model, policy())
    assert not np.array_equal(run(model, x), before)
    inner = tfmix.apply_policy(model, "mixed_bfloat16")
    np.testing.assert_array_equal(run(model, x), before)
    assert reasons(model) == {}
    inner.undo()
    assert reasons(model)["wide"] == ""
    assert not np.array_equal(run(model, x), before)
    report.undo()
    np.testing.assert_array_equal(run(model, x), before)
    assert reasons(model) == {}


# Keras warns about the layer that is never called.
@pytest.mark.filterwarnings("ignore:`build:UserWarning")
def test_a_subclassed_model_chooses_among_the_layers_it_calls():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.one = layers.Dense(32)
            self.never_called = layers.Dense(32)

        def call(self, x):
            return self.one(x)

    with tfmix.policy_scope(policy()):
        model = Own()
        run(model, np.ones((4, 32), "float32"))
    assert chosen_layers.why_not(model.never_called) is None
    assert chosen_layers.why_not(model.one) == ""


def test_layers_that_override_call_or_are_quantized_are_left_out():
    class Own(layers.Dense):
        def call(self, inputs):
            return 2 * super().call(inputs)

    with tfmix.policy_scope(policy()):
        model = keras.Sequential(
            [
                keras.Input((32,)),
                Own(32, name="own"),
                layers.Dense(32, name="plain"),
                layers.Dense(32, name="small"),
            ]
        )
    model.get_layer("small").quantize("int8")
    run(model, np.ones((2, 32), "float32"))
    assert reasons(model) == {
        "own": "a `call` of its own",
        "plain": "",
        "small": "quantized to int8",
    }


def test_a_model_without_a_large_layer_warns_once(caplog):
    model = classifier("mixed_float8")
    with caplog.at_level("WARNING"):
        run(model, digits()[0][:4])
        run(model, digits()[0][:4])
    (message,) = [m for m in caplog.messages if "no layer of" in m]
    assert "'embed': the first or the last" in message
    assert "float8_layers=[...]" in message


def test_names_that_match_nothing_are_reported():
    report = tfmix.apply_policy(classifier("float32"), policy("wides"))
    assert "'wides' in float8_layers matches no layer." in str(report.notes)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="goes with the policy 'mixed_float8'"):
        tfmix.Policy("mixed_float16", float8_layers=["Dense"])
    with pytest.raises(TypeError, match="`float8_layers` must be a list"):
        tfmix.Policy("mixed_float8", float8_layers="Dense")
    with pytest.raises(ValueError, match="must be one of"):
        tfmix.Policy("fp8")


def test_a_float8_policy_equals_no_other():
    made = tfmix.Policy("mixed_float8")
    assert (made.name, made.compute_dtype) == ("mixed_bfloat16", "bfloat16")
    assert made != tfmix.Policy("mixed_bfloat16")
    assert made != keras.DTypePolicy("mixed_bfloat16")
    assert made != policy()
    assert repr(made) == "Policy('mixed_float8')"
    assert eval(repr(policy()), {"Policy": tfmix.Policy}) == policy()
