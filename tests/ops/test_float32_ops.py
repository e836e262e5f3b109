"""Ops compute in float32 under a rule, and are Keras's own without one."""

import functools

import keras
import numpy as np
import pytest
from keras import ops as kops

from tests import helpers
from tests.ops import test_every_op as every_op
from tfmix._keras import context, op_places, replacing
from tfmix.policy import op_lists
from tfmix.policy import policy as policies

# JAX compiles each op again for each dtype, so one of the two is enough.
FORMATS_OF_ALL_OPS = (
    ("bfloat16",) if helpers.ON_JAX else ("float16", "bfloat16")
)


@pytest.fixture(autouse=True)
def _no_rules_before_or_after():
    replacing.install(())
    yield
    replacing.install(())
    assert not context.installed.rules


def available_defaults():
    return [n for n in op_lists.DEFAULT_FLOAT32_OPS if op_places.is_op(n)]


def call(name, x):
    return every_op.form_of(name)(every_op.op_of(name), x, x)


def tensor(values, dtype):
    return kops.cast(kops.convert_to_tensor(values), dtype)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype
    # NumPy cannot take a bfloat16 scalar of TensorFlow; widening is exact.
    wide = [kops.cast(t, "float32") for t in (actual, expected)]
    if "float" in helpers.dtype_of(actual):
        helpers.assert_same_bits(*wide)
    else:
        helpers.assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", FORMATS_OF_ALL_OPS)
@pytest.mark.parametrize("name", available_defaults())
def test_a_ruled_op_is_the_float32_op_rounded_once_if_it_is_16_bit(name, dtype):
    x = tensor(every_op.matrix(), dtype)
    expected = call(name, kops.cast(x, "float32"))
    if name in op_lists.INSIDE:
        cast = functools.partial(kops.cast, dtype=dtype)
        expected = keras.tree.map_structure(cast, expected)
    replacing.install([name])
    actual = call(name, x)
    keras.tree.map_structure(assert_same, actual, expected)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("name", ["sum", "mean", "cumsum", "softmax", "exp"])
def test_wider_and_integer_input_is_untouched(name, dtype):
    x = tensor(np.arange(1, 7).reshape(2, 3), dtype)
    if name == "softmax" and dtype == "int32":
        pytest.skip("Keras has no softmax of integers")
    before = getattr(kops, name)(x)
    replacing.install([name])
    assert_same(getattr(kops, name)(x), before)


@pytest.mark.parametrize("wanted", ["float16", "float32", "int32"])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_explicit_dtype_argument_is_obeyed(wanted, by_name):
    x = tensor(np.ones(4096), "float16")
    replacing.install(["cumsum"])
    if by_name:
        result = kops.cumsum(x, dtype=wanted)
    else:
        result = kops.cumsum(x, None, wanted)
    assert helpers.dtype_of(result) == wanted
    assert float(result[-1]) == 4096.0


def test_an_op_that_rounds_nothing_stays_kerass():
    before = op_places.BACKEND_OPS.numpy
    replacing.install(["sum", policies.SIXTEEN_BIT])
    now = op_places.BACKEND_OPS.numpy
    assert now.sum is not before.sum
    for name in op_lists.EXACT & vars(before).keys():
        assert getattr(now, name) is getattr(before, name)


@helpers.requires_backend("tensorflow")
def test_sparse_input_is_untouched():
    import tensorflow as tf

    dense = tf.constant([[0.0, 2.0], [3.0, 0.0]], tf.float16)
    sparse = tf.sparse.from_dense(dense)
    before = kops.sum(sparse, axis=1)
    replacing.install(["sum"])
    after = kops.sum(sparse, axis=1)
    assert type(after) is type(before)
    assert after.dtype == before.dtype
