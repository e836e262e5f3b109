"""Each helper fails on a wrong input: one that cannot fail proves nothing."""

import inspect

import keras
import ml_dtypes
import numpy as np
import pytest

from tests import helpers

DTYPES = sorted(helpers.TOLERANCES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_assert_close_accepts_half_the_tolerance_and_rejects_twice_it(dtype):
    bound = helpers.tolerance(dtype)["rtol"]
    helpers.assert_close(np.ones(3), np.full(3, 1.0 + bound / 2), dtype)
    with pytest.raises(AssertionError):
        helpers.assert_close(np.ones(3), np.full(3, 1.0 + 3 * bound), dtype)


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([1.0, -0.0], "float32"),
        np.array([1.0, 0.0], "float16"),
        np.array([[1.0, 0.0]], "float32"),
        np.array([1.0, 1e-45], "float32"),
    ],
    ids=["sign of zero", "dtype", "shape", "last bit"],
)
def test_assert_same_bits_rejects_what_looks_equal(wrong):
    value = np.array([1.0, 0.0], "float32")
    helpers.assert_same_bits(value, value.copy())
    with pytest.raises(AssertionError):
        helpers.assert_same_bits(value, wrong)
    nan = np.array([np.nan, 1.0], ml_dtypes.bfloat16)
    helpers.assert_same_bits(nan, nan.copy())


def test_the_list_of_optimizers_is_complete():
    found = {
        name
        for name, value in inspect.getmembers(keras.optimizers, inspect.isclass)
        if issubclass(value, keras.optimizers.Optimizer)
    }
    assert found - set(helpers.WRAPPERS) == set(helpers.optimizer_names())


@pytest.mark.parametrize("name", helpers.optimizer_names())
def test_optimizers_are_built_with_arguments_unlike_their_defaults(name):
    built = helpers.make_optimizer(name).get_config()
    default = getattr(keras.optimizers, name)().get_config()
    for field in helpers.OPTIMIZERS[name]:
        assert built[field] != default[field], field
