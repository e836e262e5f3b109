"""What `compile`, `summary` and `check` say of the dtypes of a model."""

import keras
import pytest

import tfmix
from tests import helpers
from tests.conversion.test_planned_policies import (
    BF16,
    F16,
    Backbone,
    OnTop,
    X,
    base,
    called,
    through_file,
    with_head,
)


def test_layers_of_a_float32_scope_are_no_news(said):
    tfmix.set_global_policy(F16)
    with tfmix.policy_scope("float32"):
        inner = base()
    with_head(inner).compile("sgd", "mse")
    assert not said


def test_a_float32_file_under_the_policy_is_news(said, tmp_path):
    model = base()
    model.compile("sgd", "mse")
    tfmix.set_global_policy(F16)
    loaded = through_file(model, tmp_path)
    assert "2 of 2 layers" in said[0]
    loaded.compile("sgd", "mse")
    assert len(said) == 1


def test_rules_of_the_users_own_are_in_the_line_to_write(said):
    model = base()
    rules = tfmix.Policy(F16, float32_layers=["first"])
    tfmix.set_global_policy(rules)
    model.compile("sgd", "mse")
    (text,) = said
    assert "1 of 1 layers" in text
    assert "tfmix.apply_policy(model, tfmix.global_policy())" in text


ENDS = ("softmax", "sigmoid", "exponential")


def ending_in(activation, **settings):
    last = keras.layers.Dense(3, activation, name="last", **settings)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), last])


def is_rounded(model, dtype="float16"):
    found = model.predict(X * 3, verbose=0)
    narrow = keras.ops.cast(keras.ops.cast(found, dtype), "float32")
    return bool((found == helpers.to_numpy(narrow)).all())


@pytest.mark.every_case("each is a message of its own, and fast")
@pytest.mark.parametrize("rules", [True, False])
@pytest.mark.parametrize("activation", ENDS)
def test_a_last_activation_in_16_bit_is_named_and_no_other(
    activation, rules, said
):
    ops = None if rules else []
    tfmix.set_global_policy(tfmix.Policy(F16, float32_ops=ops))
    model = ending_in(activation)
    model.compile("sgd", "mse")
    notes = [*said, *tfmix.summary(model).notes]
    notes += tfmix.check(model, X).notes
    named = [text for text in notes if "the last layer" in text]
    if not rules:
        assert len(named) == 3
        assert f"'last', returns its {activation} in float16" in named[0]
        assert f"tfmix.float32_output({activation!r})" in named[0]
    assert named or not is_rounded(model)
    tfmix.apply_policy(model, tfmix.global_policy())
    assert not is_rounded(model)
    assert not tfmix.summary(model).notes


def test_a_last_activation_in_float32_or_inside_is_not_named(said):
    tfmix.set_global_policy(tfmix.Policy(BF16, float32_ops=[]))
    gated = ending_in("sigmoid")
    gated.add(keras.layers.Dense(1))
    for model in (
        gated,
        ending_in("softmax", dtype="float32"),
        keras.Sequential([ending_in(None), tfmix.float32_output("softmax")]),
    ):
        model.compile("sgd", "mse")
        assert not tfmix.summary(model).notes
    assert not said


def test_the_softmax_of_a_subclassed_model_is_named(said):
    tfmix.set_global_policy(tfmix.Policy(BF16, float32_ops=[]))
    model = OnTop(Backbone())
    model.head = keras.layers.Dense(2, "softmax", name="soft")
    called(model).compile("sgd", "mse")
    (text,) = said
    assert "'soft', returns its softmax in bfloat16" in text
    assert "predictions keep 2 digits" in text
