"""A new layer gets the policy and its rules, unless its user sets a dtype."""

import keras
import numpy as np
import pytest

from tfmix.autocast import global_policy
from tfmix.policy import policy as policies

Policy = policies.Policy
SIXTEEN_BIT = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")


def computes_in(layer):
    return layer.compute_dtype


@pytest.mark.parametrize("policy", SIXTEEN_BIT)
@pytest.mark.parametrize(
    "name",
    ["Softmax", "UnitNormalization", "GlobalAveragePooling2D", "Rescaling"],
)
def test_layers_measured_to_break_stay_float32(policy, name):
    arguments = {"scale": 2.0} if name == "Rescaling" else {}
    with global_policy.policy_scope(policy):
        layer = getattr(keras.layers, name)(**arguments)
    assert layer.dtype_policy == keras.DTypePolicy("float32")
    assert type(layer.dtype_policy) is keras.DTypePolicy


@pytest.mark.parametrize(
    "items",
    [[keras.layers.Dense], ["Dense"], ["he.d"], ["head"], ["x|head"]],
)
def test_a_rule_keeps_the_layer_it_names_and_no_other(items):
    with global_policy.policy_scope(
        Policy("mixed_float16", float32_layers=items)
    ):
        head = keras.layers.Dense(1, name="head")
        other = keras.layers.EinsumDense("ab,bc->ac", 1, name="header")
        softmax = keras.layers.Softmax()
    assert computes_in(head) == "float32"
    assert computes_in(other) == "float16"
    assert computes_in(softmax) == "float16"


@pytest.mark.parametrize(
    "dtype", ["mixed_float16", "mixed_bfloat16", keras.DTypePolicy("float16")]
)
def test_an_explicit_dtype_of_the_user_wins_over_a_rule(dtype):
    with global_policy.policy_scope("mixed_float16"):
        layer = keras.layers.Softmax(dtype=dtype)
        dense = keras.layers.Dense(1, dtype="float32")
    assert layer.dtype_policy == keras.dtype_policies.get(dtype)
    assert computes_in(dense) == "float32"


def test_a_policy_given_to_a_layer_becomes_plain():
    with global_policy.policy_scope("mixed_float16"):
        layer = keras.layers.Dense(1, dtype=Policy("mixed_bfloat16"))
    assert type(layer.dtype_policy) is keras.DTypePolicy
    assert layer.dtype_policy.name == "mixed_bfloat16"


@pytest.mark.parametrize("rule", ["net/body.*", ".*/body_1"])
def test_a_rule_may_match_the_path(rule):
    policy = Policy("mixed_float16", float32_layers=[rule])
    with global_policy.policy_scope(policy):
        model = keras.Sequential(
            [
                keras.layers.Dense(2, name="body_1"),
                keras.layers.Dense(2, name="tail"),
            ],
            name="net",
        )
    # Paths exist only after the first call, which may be after the scope.
    model(np.ones((1, 2)))
    assert [computes_in(layer) for layer in model.layers] == [
        "float32",
        "float16",
    ]


def test_a_rule_by_path_sees_the_inputs_uncast_at_the_first_call():
    policy = Policy("mixed_float16", float32_layers=["net/.*"])
    seen = []

    class Probe(keras.layers.Layer):
        def call(self, x):
            seen.append(keras.backend.standardize_dtype(x.dtype))
            return x

    with global_policy.policy_scope(policy):
        model = keras.Sequential([Probe()], name="net")
        result = model(np.array([[70000.0]], "float32"))
    assert set(seen) == {"float32"}
    assert float(result[0, 0]) == 70000.0


@pytest.mark.costly
def test_layers_inside_a_ruled_layer_are_float32_too():
    policy = Policy("float16", float32_layers=["LSTM", "Bidirectional"])
    with global_policy.policy_scope(policy):
        # JAX cannot create Keras's default orthogonal matrices in float16.
        any_dtype = {"recurrent_initializer": "glorot_uniform"}
        plain = keras.layers.LSTM(2)
        both_ways = keras.layers.Bidirectional(keras.layers.GRU(2, **any_dtype))
        free = keras.layers.GRU(2, **any_dtype)
    x = np.ones((1, 3, 2), "float32")
    for layer in (plain, both_ways, free):
        layer(x)
    assert computes_in(plain.cell) == "float32"
    assert {v.dtype for v in plain.weights} == {"float32"}
    assert {computes_in(x) for x in both_ways._flatten_layers()} == {"float32"}
    assert {v.dtype for v in both_ways.weights} == {"float32"}
    assert computes_in(free.cell) == "float16"
    assert {v.dtype for v in free.weights} == {"float16"}


def test_a_users_composite_under_a_rule_is_float32_inside():
    class Block(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.free = keras.layers.Dense(2)
            self.own = keras.layers.Dense(2, dtype="mixed_bfloat16")

        def build(self, shape):
            self.late = keras.layers.Dense(2)

        def call(self, x):
            return self.late(self.own(self.free(x)))

    with global_policy.policy_scope(
        Policy("mixed_float16", float32_layers=[Block])
    ):
        block = Block()
        block(np.ones((1, 2), "float32"))
        block(np.ones((1, 2), "float32"))
    assert computes_in(block) == "float32"
    assert computes_in(block.free) == "float32"
    assert computes_in(block.late) == "float32"
    assert computes_in(block.own) == "bfloat16"


@pytest.mark.costly
def test_layers_inside_attention_follow_it_and_use_the_op_rules():
    with global_policy.policy_scope("mixed_float16"):
        layer = keras.layers.MultiHeadAttention(2, 4)
        x = np.full((1, 3, 8), 100.0, "float32")
        result = keras.ops.convert_to_numpy(layer(x, x))
    assert {computes_in(inner) for inner in layer._flatten_layers()} == {
        "float16"
    }
    assert np.isfinite(result).all()


def test_layers_that_are_loaded_keep_what_they_were_saved_with():
    config = keras.layers.Softmax(dtype="mixed_float16").get_config()
    dense = keras.layers.Dense(1, dtype="float32").get_config()
    with global_policy.policy_scope("mixed_float16"):
        softmax = keras.layers.Softmax.from_config(config)
        loaded = keras.layers.Dense.from_config(dense)
    assert computes_in(softmax) == "float16"
    assert computes_in(loaded) == "float32"


@pytest.mark.costly
def test_level_one_leaves_only_matmuls_in_16_bit():
    with global_policy.policy_scope("O1"):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Conv2D(4, 3),
                keras.layers.BatchNormalization(),
                keras.layers.ELU(),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )
    assert [computes_in(layer) for layer in model.layers] == [
        "float16",
        "float32",
        "float32",
        "float32",
        "float16",
    ]


@pytest.mark.parametrize(
    ("level", "batchnorm", "layernorm", "dense"),
    [
        ("O0", "float32", "float32", "float32"),
        ("O2", "float32", "float32", "float16"),
        ("O3", "float16", "float16", "float16"),
    ],
)
def test_levels_decide_on_normalisation(level, batchnorm, layernorm, dense):
    with global_policy.policy_scope(level):
        layers = (
            keras.layers.BatchNormalization(),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(1),
        )
    assert tuple(map(computes_in, layers)) == (batchnorm, layernorm, dense)


def test_a_map_decides_where_it_names_a_layer_and_rules_elsewhere():
    policy = keras.dtype_policies.DTypePolicyMap(
        keras.DTypePolicy("mixed_float16"),
        {"net/kept": keras.DTypePolicy("mixed_float16")},
    )
    with global_policy.policy_scope(policy):
        kept = keras.layers.Softmax(name="kept")
        ruled = keras.layers.Softmax(name="ruled")
    assert kept.dtype_policy is policy
    assert computes_in(ruled) == "float32"
    assert len(policy) == 1


def test_rules_do_not_apply_to_a_policy_of_32_bits():
    with global_policy.policy_scope(keras.DTypePolicy("float64")):
        assert computes_in(keras.layers.Softmax()) == "float64"
