"""A new layer gets the policy and its rules, unless its user sets a dtype."""

import keras
import numpy as np
import pytest
from keras import layers

from tests import helpers
from tfmix.autocast import global_policy
from tfmix.policy.policy import Policy


def under(policy, make, *arguments, **settings):
    with global_policy.policy_scope(policy):
        return make(*arguments, **settings)


def keeping(*items, policy="mixed_float16"):
    """Returns a policy under which these layers stay in float32."""
    return Policy(policy, float32_layers=[*items])


def dtypes(*made):
    return [layer.compute_dtype for layer in made]


@pytest.mark.parametrize("item", [layers.Dense, "Dense", "he.d", "x|head"])
def test_a_rule_keeps_the_layer_it_names_and_no_other(item):
    with global_policy.policy_scope(keeping(item)):
        head = layers.Dense(1, name="head")
        other = layers.EinsumDense("ab,bc->ac", 1, name="header")
        found = dtypes(head, other, layers.Softmax())
    assert found == ["float32", "float16", "float16"]


@pytest.mark.parametrize(
    "dtype", ["mixed_float16", "mixed_bfloat16", keras.DTypePolicy("float16")]
)
def test_an_explicit_dtype_of_the_user_wins_over_a_rule(dtype):
    softmax = under("mixed_float16", layers.Softmax, dtype=dtype)
    assert softmax.dtype_policy == keras.dtype_policies.get(dtype)
    dense = under("mixed_float16", layers.Dense, 1, dtype="float32")
    assert dense.compute_dtype == "float32"


@pytest.mark.parametrize("rule", ["net/body.*", ".*/body_1"])
def test_a_rule_may_match_the_path(rule):
    with global_policy.policy_scope(keeping(rule)):
        both = [layers.Dense(2, name=name) for name in ("body_1", "tail")]
        model = keras.Sequential(both, name="net")
    # Paths exist only after the first call, which may be after the scope.
    model(np.ones((1, 2)))
    assert dtypes(*both) == ["float32", "float16"]


def test_a_rule_by_path_sees_the_inputs_uncast_at_the_first_call():
    seen = []

    class Probe(layers.Layer):
        def call(self, x):
            seen.append(helpers.dtype_of(x))
            return x

    with global_policy.policy_scope(keeping("net/.*")):
        model = keras.Sequential([Probe()], name="net")
        result = model(np.array([[70000.0]], "float32"))
    assert set(seen) == {"float32"}
    assert float(result[0, 0]) == 70000.0


def test_a_users_composite_under_a_rule_is_float32_inside():
    class Block(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.free = layers.Dense(2)
            self.own = layers.Dense(2, dtype="mixed_bfloat16")

        def build(self, shape):
            self.late = layers.Dense(2)

        def call(self, x):
            return self.late(self.own(self.free(x)))

    with global_policy.policy_scope(keeping(Block)):
        block = Block()
        for _ in range(2):
            block(np.ones((1, 2), "float32"))
    assert set(dtypes(block, block.free, block.late)) == {"float32"}
    assert block.own.compute_dtype == "bfloat16"


NORMALIZATIONS = {layers.BatchNormalization, layers.LayerNormalization}
MADE = {layers.Conv2D: (4, 3), layers.Dense: (2,)}
MADE |= dict.fromkeys([*NORMALIZATIONS, layers.ELU, layers.Flatten], ())


@pytest.mark.every_case("each row is a level, and fast")
@pytest.mark.parametrize(
    ("level", "float32"),
    [
        ("O0", {*MADE}),
        # Only products are in 16 bit.
        ("O1", {*MADE} - {layers.Conv2D, layers.Dense}),
        ("O2", NORMALIZATIONS),
        ("O3", set()),
    ],
)
def test_a_level_decides_which_layers_compute_in_float32(level, float32):
    found = {
        kind: under(level, kind, *arguments).compute_dtype
        for kind, arguments in MADE.items()
    }
    assert {kind for kind in MADE if found[kind] == "float32"} == float32
    assert set(found.values()) <= {"float16", "float32"}


def test_a_map_decides_where_it_names_a_layer_and_rules_elsewhere():
    entry = {"net/kept": keras.DTypePolicy("mixed_float16")}
    policy = keras.dtype_policies.DTypePolicyMap(
        keras.DTypePolicy("mixed_float16"), entry
    )
    kept = under(policy, layers.Softmax, name="kept")
    assert kept.dtype_policy is policy
    ruled = under(policy, layers.Softmax, name="ruled")
    assert ruled.compute_dtype == "float32"
    assert len(policy) == 1
