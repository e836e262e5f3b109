"""Bfloat16 without masters: unbiased, seeded and the same everywhere."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.optimizers import sixteen_bit
from tfmix.optimizers import bfloat16_optimizer, noise

COUNT = 100_000
STEP = 2.0**-7  # the gap between 1.0 and the next bfloat16


def rounded(value, seed=3, step=0, count=COUNT):
    values = ops.full((count,), value, "float32")
    seed = ops.cast(seed, "int32")
    drawn = noise.noise((count,), seed, 1, ops.cast(step, "int32"))
    return bfloat16_optimizer.stochastic(values, drawn)


def to_float64(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32")).astype("float64")


@pytest.mark.parametrize("share", [0.001, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_of_many_roundings_is_the_value(share, sign):
    value = sign * float(np.float32(1.0 + share * STEP))
    results = to_float64(rounded(value))
    assert set(np.abs(results)) == {1.0, 1.0 + STEP}
    share = (abs(value) - 1.0) / STEP
    standard_error = STEP * np.sqrt(share * (1 - share) / COUNT)
    assert abs(results.mean() - value) < 4 * standard_error


@pytest.mark.costly
def test_bfloat16_numbers_stay():
    for value in (0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf")):
        assert set(to_float64(rounded(value, count=64))) == {value}
    assert np.isnan(to_float64(rounded(float("nan"), count=64))).all()


def test_seed_step_and_stream_decide_and_nothing_else():
    value = 1.0 + STEP / 2
    first = to_float64(rounded(value))
    np.testing.assert_array_equal(first, to_float64(rounded(value)))
    assert (first != to_float64(rounded(value, seed=4))).any()
    assert (first != to_float64(rounded(value, step=1))).any()


@pytest.mark.costly
def test_training_is_the_same_with_and_without_xla():
    final = []
    for jit in (False, True):
        stored = sixteen_bit.variables("bfloat16")
        # With a power of two as the rate, float32 is exact in any order.
        sgd = keras.optimizers.SGD(2.0**-6)
        optimizer = sixteen_bit.WAYS["stochastic"](sgd)
        gradients = sixteen_bit.gradients(20)
        sixteen_bit.run(optimizer, stored, gradients, jit=jit)
        final.append(sixteen_bit.bits_of(stored))
    assert final[0] == final[1]


def test_two_assignments_in_a_step_draw_different_bits():
    weight = keras.Variable(np.ones(COUNT), dtype="bfloat16", name="w")
    decay = keras.optimizers.SGD(1.0, weight_decay=STEP / 8)
    optimizer = bfloat16_optimizer.BFloat16Optimizer(decay, seed=1)
    optimizer.build([weight])
    optimizer.apply([np.full(COUNT, STEP / 8, "float32")])
    # The mean is 1 - STEP / 4. Steps below 1.0 are half as large.
    error = STEP / 2 * np.sqrt(0.25 / COUNT) * 2
    mean = to_float64(weight).mean()
    assert abs(mean - (1 - STEP / 4)) < 4 * error


def test_an_unnamed_seed_is_drawn_from_the_seeded_generator():
    keras.utils.set_random_seed(5)
    first = bfloat16_optimizer.BFloat16Optimizer("sgd").seed
    keras.utils.set_random_seed(5)
    assert bfloat16_optimizer.BFloat16Optimizer("sgd").seed == first


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": -1}, ValueError, "0 or more.*seed=-1"),
        ({"seed": 2**31}, ValueError, r"below 2\*\*31.*seed=2147483648"),
        ({"seed": 1.5}, TypeError, r"integer.*seed=1.5"),
        ({"seed": True}, TypeError, r"integer.*seed=True"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        bfloat16_optimizer.BFloat16Optimizer("sgd", **arguments)
