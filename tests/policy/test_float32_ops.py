"""The default list of ops agrees with the measurement and the guide."""

import json
import pathlib

import keras
import pytest

from benchmarks import layer_ops
from tfmix._keras import op_places
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


def test_the_recorded_measurement_justifies_the_default_list():
    worth = measured()
    assert set(worth) == set(layer_ops.CASES)
    # No layer calls the excluded ones; see `DEFAULT_FLOAT32_OPS`.
    called = {name for name in worth if not name.startswith("nan")}
    justified = {name for name in called - {"exp2", "psnr"} if worth[name]}
    # The record has errors of results. `rsqrt` is on the list for its gradient,
    # which is infinite in float16 below 6e-4.
    assert set(op_lists.DEFAULT_FLOAT32_OPS) == justified | {"rsqrt"}


def test_every_default_op_is_in_the_guide():
    text = (DOCS / "what-stays-float32.md").read_text(encoding="utf-8")
    names = op_lists.DEFAULT_FLOAT32_OPS
    assert [name for name in names if f"`{name}`" not in text] == []


def test_lists_are_copies_that_can_be_extended_and_shortened():
    others = [
        name
        for name in layer_ops.CASES
        if name not in op_lists.DEFAULT_FLOAT32_OPS and op_places.is_op(name)
    ]
    assert "exp" in others
    mine = op_lists.default_float32_ops(add=others)
    assert set(mine) == {*op_lists.DEFAULT_FLOAT32_OPS, *others}
    mine.clear()
    assert "softmax" in op_lists.default_float32_ops()
    assert "sum" not in op_lists.default_float32_ops(remove=["sum"])


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
        (["sum", "sum"], ValueError, "names 'sum' twice"),
        (["cast"], ValueError, "take tensors.*'cast'"),
        ("sum", TypeError, r"must be a list.*float32_ops='sum'"),
        ([keras.ops.sum], TypeError, "takes names.*function"),
    ],
)
def test_a_wrong_list_is_an_error(names, error, message):
    with pytest.raises(error, match=message):
        Policy("mixed_float16", float32_ops=names)


def test_removing_what_is_not_on_the_list_is_an_error():
    with pytest.raises(ValueError, match="`remove`.*'softmx'.*'softmax'"):
        op_lists.default_float32_ops(remove=["softmx"])
