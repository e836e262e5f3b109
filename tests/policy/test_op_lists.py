"""Three lists decide the dtypes of an op, and agree with what was measured."""

import json
import pathlib

import keras
import pytest
from keras import ops

import tfmix
from benchmarks import layer_ops
from tests import helpers
from tests.ops import test_every_op as every_op
from tfmix._keras import op_places
from tfmix.ops import apply
from tfmix.policy import op_lists
from tfmix.policy.policy import Policy

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def measured():
    """Maps each op to whether a rule pays off on any backend."""
    worth = {}
    for backend in ("tensorflow", "jax"):
        path = DOCS / "benchmarks" / f"layers-ops-{backend}.json"
        (table,) = json.loads(path.read_text(encoding="utf-8"))["tables"]
        for row in table["rows"]:
            worth[row["op"]] = worth.get(row["op"], False) or row["worth it"]
    return worth


def test_every_op_that_was_measured_to_break_is_on_a_list():
    worth = measured()
    assert set(worth) == set(layer_ops.CASES)
    broken = {name for name, is_worth in worth.items() if is_worth}
    assert len(broken) > 30
    assert broken <= {*op_lists.DEFAULT_FLOAT32_OPS, *op_lists.NARROW}


def test_an_op_is_on_one_list():
    everything = [*op_lists.NARROW, *op_lists.WIDE, *op_lists.INSIDE]
    assert len(everything) == len(set(everything))


# Some of each line of the lists, in their order there.
NARROW = "matmul dot einsum conv depthwise_conv separable_conv".split()
WIDE = """
    sum var nanmean trace cumsum bincount norm logsumexp cdist
    prod cumprod square power exp sinh logspace
    log log1p sqrt rsqrt divide hypot erfinv arccos
    softmax log_softmax sigmoid softplus tanh
    cholesky inv lstsq lu_factor solve svd fft rfft
    categorical_crossentropy binary_crossentropy
""".split()
INSIDE = """
    layer_normalization rms_normalization dot_product_attention average_pool
    selu hard_silu take_along_axis broadcast_to repeat tile qr
""".split()
OTHERS = "add multiply maximum where reshape concatenate relu gelu sin".split()


def dtypes_of(name, other):
    """Returns the dtypes of an op of a 16-bit tensor and another."""
    call = every_op.form_of(name)
    x, y = ops.cast(every_op.matrix(), "float16"), every_op.matrix()
    with tfmix.policy_scope("mixed_float16"):
        results = call(every_op.op_of(name), x, ops.cast(y, other))
    return {helpers.dtype_of(t) for t in keras.tree.flatten(results)}


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_op_takes_16_bit_even_beside_float32(name):
    assert dtypes_of(name, "float16") == {"float16"}
    assert dtypes_of(name, "float32") == {"float16"}


@pytest.mark.parametrize("name", WIDE)
def test_a_wide_op_returns_float32(name):
    # Some also return the places of rows.
    assert dtypes_of(name, "float16") - {"int32"} == {"float32"}


@pytest.mark.parametrize("name", INSIDE)
def test_an_op_that_is_float32_inside_returns_16_bit(name, monkeypatch):
    seen = []
    compute = apply.Call.in_float32

    def noting(call):
        seen.append(call.op.name)
        return compute(call)

    monkeypatch.setattr(apply.Call, "in_float32", noting)
    assert dtypes_of(name, "float16") == {"float16"}
    assert name in seen


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_op_takes_what_comes(name):
    assert dtypes_of(name, "float16") == {"float16"}
    if name in ("add", "multiply", "maximum", "where", "concatenate"):
        assert dtypes_of(name, "float32") == {"float32"}


@pytest.mark.parametrize(
    ("name", "rules", "expected"),
    [
        ("cos", ["cos"], "float32"),
        ("matmul", ["matmul"], "float32"),
        # An activation that Keras has as a class, too.
        ("relu", ["relu"], "float32"),
        ("exp", [], "float16"),
        ("selu", ["selu"], "float16"),
    ],
)
def test_a_policys_own_list_decides_as_the_default_one(name, rules, expected):
    x = ops.cast(every_op.matrix(), "float16")
    policy = Policy("mixed_float16", float32_ops=rules)
    with tfmix.policy_scope(policy):
        found = every_op.form_of(name)(every_op.op_of(name), x, x)
    assert helpers.dtype_of(found) == expected


def test_every_default_op_is_in_the_guide():
    text = (DOCS / "what-stays-float32.md").read_text(encoding="utf-8")
    names = op_lists.DEFAULT_FLOAT32_OPS
    assert [name for name in names if f"`{name}`" not in text] == []


def test_lists_are_copies_that_can_be_extended():
    others = ["cos", "gelu"]
    mine = op_lists.default_float32_ops(add=others)
    assert set(mine) == {*op_lists.DEFAULT_FLOAT32_OPS, *others}
    mine.clear()
    assert "softmax" in op_lists.default_float32_ops()


def test_the_default_list_has_no_double_and_only_real_ops():
    names = op_lists.DEFAULT_FLOAT32_OPS
    assert op_lists.resolve(names) == names
    missing = [name for name in names if not op_places.is_op(name)]
    if keras.version() >= "3.15":
        assert missing == []


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["sofmax"], ValueError, r"'sofmax'.*Did you mean 'softmax'\?"),
        (["cast"], ValueError, "take tensors.*'cast'"),
        # An activation computes by the ops that it calls.
        (["mish"], ValueError, "functions of `keras.ops`.*'mish'"),
        ("sum", TypeError, r"must be a list.*float32_ops='sum'"),
        ([keras.ops.sum], TypeError, "takes names.*function"),
    ],
)
def test_a_wrong_list_is_an_error(names, error, message):
    with pytest.raises(error, match=message):
        Policy("mixed_float16", float32_ops=names)
