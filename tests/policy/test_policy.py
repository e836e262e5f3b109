"""`Policy`: its names and rules, and how Keras treats it."""

import copy
import pickle

import keras
import numpy as np
import pytest

import tfmix
from tfmix.policy import policy as policies

pytestmark = pytest.mark.every_case("each row is a separate rule, and fast")

Policy = policies.Policy

UNUSUAL = {
    "float32_layers": ["head", keras.layers.Dropout],
    "float32_ops": ["tanh"],
}


@pytest.mark.parametrize(
    ("name", "compute", "variable"),
    [
        ("float32", "float32", "float32"),
        ("mixed_float16", "float16", "float32"),
        ("mixed_bfloat16", "bfloat16", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("O0", "float32", "float32"),
        ("O1", "float16", "float32"),
        ("O2", "float16", "float32"),
        ("O3", "float16", "float16"),
    ],
)
def test_a_name_decides_the_dtypes(name, compute, variable):
    policy = Policy(name)
    assert (policy.compute_dtype, policy.variable_dtype) == (compute, variable)


def test_auto_becomes_the_policy_of_this_machine(monkeypatch):
    monkeypatch.setattr(policies, "auto_policy", lambda: "mixed_bfloat16")
    assert Policy("auto").name == "mixed_bfloat16"
    assert Policy("auto") == Policy("mixed_bfloat16")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Mixed_Float16", "mixed_float16"),
        ("mixd_float16", "mixed_float16"),
        ("bfloat_16", "bfloat16"),
    ],
)
def test_a_wrong_name_is_refused_with_the_closest_and_all_names(name, meant):
    with pytest.raises(ValueError, match="must be one of") as error:
        Policy(name)
    text = str(error.value)
    assert f"name={name!r}" in text
    assert f"Did you mean '{meant}" in text
    assert all(repr(allowed) in text for allowed in policies.NAMES)


@pytest.mark.parametrize("name", ["int4", "bool", "uint8", "half", ""])
def test_a_distant_name_is_refused_without_a_suggestion(name):
    with pytest.raises(ValueError, match="must be one of") as error:
        Policy(name)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Policy(None), "must be a string, one of"),
        (lambda: Policy(np.dtype("float16")), "must be a string, one of"),
        (lambda: Policy(np.float16), "must be a string, one of"),
    ],
)
def test_an_argument_of_another_type_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))],
)
@pytest.mark.parametrize("name", ["mixed_float16", "O3"])
def test_copies_keep_every_rule(name, duplicate):
    policy = Policy(name, **UNUSUAL)
    twin = duplicate(policy)
    assert type(twin) is Policy
    assert twin == policy
    assert hash(twin) == hash(policy)
    assert twin.level == policy.level
    for field, value in UNUSUAL.items():
        assert getattr(twin, field) == value
        assert getattr(Policy(name), field) != value


def test_policies_compare_by_content():
    plain = keras.DTypePolicy("mixed_float16")
    assert Policy("mixed_float16") == Policy("mixed_float16")
    assert Policy("mixed_float16") != Policy("mixed_bfloat16")
    assert Policy("mixed_float16") != Policy("mixed_float16", **UNUSUAL)
    assert plain == Policy("mixed_float16")
    assert Policy("mixed_float16") == plain
    assert plain != Policy("mixed_float16", **UNUSUAL)
    assert Policy("mixed_float16") != Policy("O2")
    assert Policy("mixed_float16") != "mixed_float16"
    assert len({Policy("O2"), Policy("O2"), Policy("O1")}) == 2


def test_lists_are_read_as_copies():
    policy = Policy("mixed_float16")
    for rules in ("float32_layers", "float32_ops"):
        getattr(policy, rules).clear()
        assert getattr(policy, rules)


@pytest.mark.parametrize(
    "settings",
    [
        "float32_layers=['head']",
        "float32_ops=[]",
        f"float32_layers={['a', *tfmix.Policy.default_float32_layers()]!r}",
    ],
)
def test_the_representation_names_what_is_not_default(settings):
    text = f"Policy('mixed_float16', {settings})"
    assert repr(eval(text, {"Policy": Policy})) == text


def test_a_layer_with_a_policy_is_saved_as_plain_keras():
    layer = keras.layers.Dense(2, dtype=Policy("mixed_float16", **UNUSUAL))
    assert layer.get_config()["dtype"] == {
        "module": "keras",
        "class_name": "DTypePolicy",
        "config": {"name": "mixed_float16"},
        "registered_name": None,
    }


@pytest.mark.parametrize("name", ["float32", "O0"])
def test_a_float32_policy_has_no_reason_to_keep_anything(name):
    layer = keras.layers.Softmax
    assert Policy(name).why_float32(layer, "softmax") is None


def test_reasons_distinguish_our_rules_from_the_users():
    policy = Policy("mixed_float16", float32_layers=["Softmax", "head.*"])
    ours = policy.why_float32(keras.layers.Softmax, "softmax")
    users = policy.why_float32(keras.layers.Dense, "head_2")
    assert "probabilities" in ours
    assert "head.*" in users
    assert policy.why_float32(keras.layers.Dense, "dense") is None


@pytest.mark.parametrize("name", ["O1", "O2", "float16", "bfloat16"])
def test_levels_and_pure_policies_keep_batch_normalisation(name):
    batchnorm = keras.layers.BatchNormalization
    assert Policy(name).why_float32(batchnorm, "bn")
    for other in ("O3", "mixed_float16"):
        assert Policy(other).why_float32(batchnorm, "bn") is None
    is_level = name in ("O1", "O2")
    without = Policy(name, float32_layers=[]).why_float32(batchnorm, "bn")
    assert (without is None) is is_level


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (keras.DTypePolicy("mixed_bfloat16"), "mixed_bfloat16"),
        (keras.DTypePolicy("float64"), "float32"),
        (keras.dtype_policies.DTypePolicyMap("float16"), "float16"),
        (
            keras.dtype_policies.QuantizedDTypePolicy("int8", "mixed_bfloat16"),
            "mixed_bfloat16",
        ),
    ],
)
def test_any_keras_policy_has_the_rules_of_its_compute_dtype(policy, name):
    assert policies.with_rules(policy) == Policy(name)


def test_a_map_is_16_bit_when_any_entry_is():
    entry = {"a": keras.DTypePolicy("mixed_float16")}
    map_of = keras.dtype_policies.DTypePolicyMap
    assert policies.is_sixteen_bit(map_of("float32", entry))
    assert not policies.is_sixteen_bit(map_of("float32"))


def test_a_configuration_keeps_the_name_which_plain_keras_can_read():
    config = Policy("O2", **UNUSUAL).get_config()
    assert config == {"name": "mixed_float16"}
    assert keras.DTypePolicy.from_config(config).name == "mixed_float16"
    assert Policy.from_config(config) == Policy("mixed_float16")
