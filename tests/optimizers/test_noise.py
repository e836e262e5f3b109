"""The noise of stochastic rounding is uniform over positions and steps."""

import numpy as np
import pytest
from keras import ops

from tests import steps
from tfmix.optimizers import noise

COUNT = 100_000


def numbers(seed=1, stream=0, step=0, shape=(COUNT,)):
    """Returns the noise as float64 in [0, 1)."""
    seed, step = ops.cast(seed, "int32"), ops.cast(step, "int32")
    words = ops.convert_to_numpy(noise.noise(shape, seed, stream, step))
    return words.view("uint32") / 2.0**32


@pytest.mark.parametrize("step", [0, 1, 10**6, 2**31 - 1])
def test_noise_is_uniform_over_positions(step):
    found = numbers(step=step)
    assert found.mean() == pytest.approx(0.5, abs=0.005)
    assert found.std() == pytest.approx(12**-0.5, abs=0.005)
    for apart in (1, 2, 256, 1024):
        pairs = np.corrcoef(found[apart:], found[:-apart])
        assert abs(pairs[0, 1]) < 0.02, apart


def test_seeds_and_streams_draw_different_numbers():
    one = numbers()
    for other in (numbers(seed=2), numbers(stream=1), numbers(stream=-1)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_successive_steps_are_more_even_than_random_numbers():
    shape = (64,)
    steps = [numbers(step=step, shape=shape) for step in range(3, 103)]
    ordered = np.sort(steps, axis=0)
    gaps = np.diff(ordered, axis=0)
    # A hundred random numbers would leave gaps of 0.05, and of less than 1e-4.
    assert gaps.max() < 0.02
    assert gaps.min() > 0.005


def test_noise_is_the_same_in_a_compiled_function():
    expected = numbers(shape=(5, 7), step=9)

    def draw():
        return noise.noise((5, 7), ops.cast(1, "int32"), 0, 9)

    found = ops.convert_to_numpy(steps.compiled(draw, steps.MODES[-1])())
    np.testing.assert_array_equal(found.view("uint32") / 2.0**32, expected)
