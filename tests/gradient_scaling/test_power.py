"""The power of two that brings a gradient to order one."""

import math

import keras
import numpy as np
import pytest

from tests import helpers
from tfmix.gradient_scaling import power

pytestmark = pytest.mark.every_case("each row is a rule of its own, and fast")


def of(*gradients, losses=(), place=1.0):
    tensors = [keras.ops.convert_to_tensor(each) for each in gradients]
    losses = [keras.ops.convert_to_tensor(each) for each in losses]
    found = power.of(tensors, losses, place)
    return float(helpers.to_numpy(found.up))


@pytest.mark.parametrize("exponent", [-90, -20, -1, 0, 1, 20, 90])
def test_the_largest_number_lies_between_one_and_two(exponent):
    largest = np.float32(1.75 * 2.0**exponent)
    assert of(np.float32([0.0, -largest, largest / 4])) == 2.0**-exponent


@pytest.mark.parametrize("exponent", [-126, -101, 101, 127])
def test_the_power_and_its_reciprocal_stay_normal(exponent):
    found = of(np.float32([2.0**exponent]))
    assert found == 2.0 ** -math.copysign(100, exponent)


def test_the_largest_of_several_gradients_decides():
    assert of(np.float32([2.0**-9]), np.float32([[2.0**-3]])) == 8.0


def test_a_sum_that_reaches_far_leaves_room():
    # These are 2**14 ones: a bias gets their sum.
    assert of(np.ones(2**14, "float32")) == 0.25
    assert of(np.ones(2**12, "float32")) == 1.0


def test_added_losses_only_count_in_the_sum():
    small = np.float32([2.0**-8])
    assert of(small, losses=[np.float32(1.0)]) == 2.0**8
    assert of(small, losses=[np.float32(2.0**8)]) == 2.0**4


@pytest.mark.parametrize("values", [[], [0.0]])
def test_gradients_without_a_size_are_left_unchanged(values):
    assert of(np.float32(values)) == 1.0
    assert of(np.float32(values), place=0.5) == 1.0


@pytest.mark.parametrize(
    "values", [[np.inf, 1.0], [np.nan, 1.0], [-np.inf], [-np.nan]]
)
def test_a_gradient_that_is_not_finite_leaves_as_nan(values):
    values = keras.ops.convert_to_tensor(np.float32(values))
    found = power.of([values], [], 1.0)
    assert 0 < float(found.up) < math.inf
    assert math.isnan(float(found.down))


def test_a_place_moves_the_power():
    assert of(np.float32([4.0]), place=0.25) == 0.0625
    assert of(np.ones(2**14, "float32"), place=0.25) == 0.0625


HIGH = 2.0**15


def test_a_high_place_leaves_room():
    assert of(np.ones((8, 1), "float32"), place=HIGH) == 2.0**8
    assert of(np.ones((2**6, 1), "float32"), place=HIGH) == 2.0**6
    assert of(np.ones((2**14, 1), "float32"), place=HIGH) == 0.25


def test_the_gradient_of_a_loss_for_each_example_lies_higher():
    assert of(np.ones(8, "float32"), place=HIGH) == 2.0**12
    assert of(np.float32(2.0), place=HIGH) == 2.0**14
    assert of(np.ones(2**10, "float32"), place=HIGH) == 2.0**5
    assert of(np.ones(8, "float32"), place=0.5) == 0.5
