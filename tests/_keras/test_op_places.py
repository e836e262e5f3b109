"""Ops are replaced where public ops look them up, and only once."""

import types

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix._keras import op_places

TRIANGLE = np.tril(np.ones((3, 3))).astype("float16")


def test_an_op_that_two_modules_define_is_replaced_where_keras_calls_it():
    assert op_places.targets("tanh") == ((op_places.BACKEND_OPS, "numpy"),)


@pytest.mark.parametrize("name", [*op_places.CONVERSIONS, "slice"])
def test_only_ops_of_the_core_are_replaced(name):
    ((owner, attribute),) = op_places.targets(name)
    core = getattr(owner, attribute)
    copy = op_places.copy_module(core, lambda function, name: name)
    changed = {n for n in vars(core) if vars(copy)[n] is not vars(core)[n]}
    assert changed == {
        *(*op_places.CONVERSIONS, "slice", "slice_update", "unstack"),
        *("scatter", "scatter_update", "vectorized_map"),
    }
    assert op_places.is_op(name) == (name not in op_places.CONVERSIONS)


def test_a_rule_for_one_op_leaves_the_rest_of_linear_algebra_alone():
    policy = tfmix.Policy("mixed_float16", float32_ops=["qr"])
    with tfmix.policy_scope(policy):
        q, _ = keras.ops.qr(TRIANGLE)
        assert keras.backend.standardize_dtype(q.dtype) == "float16"
        # Neither backend solves in float16.
        with pytest.raises(Exception, match="float16|HALF|MatrixSolve"):
            keras.ops.solve(TRIANGLE, TRIANGLE)
    with tfmix.policy_scope("mixed_float16"):
        solved = helpers.to_numpy(keras.ops.solve(TRIANGLE, TRIANGLE))
    np.testing.assert_array_equal(solved, np.eye(3))


def test_a_copied_module_has_rules_for_functions_and_the_rest_unchanged():
    module = types.ModuleType("theirs")
    source = "import math\ndef f(x): return x\ndef _g(x): return x\nlimit = 3"
    exec(source, vars(module))
    names = []

    def rule(function, name):
        names.append(name)
        return lambda x: -function(x)

    copy = op_places.copy_module(module, rule)
    assert names == ["f"]
    assert (copy.f(2), copy._g(2), copy.limit) == (-2, 2, 3)
    assert module.f(2) == 2


def test_modules_that_keras_no_longer_has_are_named(monkeypatch):
    op_places._modules.cache_clear()
    monkeypatch.setattr(op_places, "_THEMES", ("algebra",))
    with pytest.raises(RuntimeError, match=r"\['algebra'\].*float32_ops=\[\]"):
        op_places._modules(op_places.BACKEND_OPS)
    op_places._modules.cache_clear()
