"""Ops are replaced where public ops look them up, and only once."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix._keras import op_places

TRIANGLE = np.tril(np.ones((3, 3))).astype("float16")


def test_a_rule_for_one_op_leaves_the_rest_of_linear_algebra_alone():
    policy = tfmix.Policy("mixed_float16", float32_ops=["inv"])
    with tfmix.policy_scope(policy):
        inverse = keras.ops.inv(TRIANGLE)
        assert keras.backend.standardize_dtype(inverse.dtype) == "float32"
        # Neither backend solves in float16.
        with pytest.raises(Exception, match="float16|HALF|MatrixSolve"):
            keras.ops.solve(TRIANGLE, TRIANGLE)
    with tfmix.policy_scope("mixed_float16"):
        solved = helpers.to_numpy(keras.ops.solve(TRIANGLE, TRIANGLE))
    np.testing.assert_array_equal(solved, np.eye(3))


def test_modules_that_keras_no_longer_has_are_named(monkeypatch):
    op_places._modules.cache_clear()
    monkeypatch.setattr(op_places, "_THEMES", ("algebra",))
    with pytest.raises(ImportError, match=r"\['algebra'\].*float32_ops=\[\]"):
        op_places._modules(op_places.BACKEND_OPS)
    op_places._modules.cache_clear()
