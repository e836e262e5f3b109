"""Float32 is split and joined exactly; fingerprints notice changes."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from keras import ops

from tests import steps
from tfmix._keras import kernels
from tfmix.optimizers import bits


def words(*values):
    return np.array(values, "uint32")


def round_trip(word):
    value = ops.convert_to_tensor(word.view("float32"))
    joined = bits.join(*bits.split(value))
    return ops.convert_to_numpy(joined).view("uint32")


@pytest.mark.costly
@hypothesis.given(strategies.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=200, deadline=None)
def test_every_number_equals_its_two_halves(word):
    number = words(word).view("float32")
    if not np.isnan(number[0]):
        assert round_trip(words(word))[0] == word


@pytest.mark.costly
def test_ties_limits_and_signed_zeros_are_exact():
    tie_at_even, tie_at_odd = 0x3F808000, 0x3F818000
    largest, infinite, minus_zero = 0x7F7FFFFF, 0x7F800000, 0x80000000
    edge = words(tie_at_even, tie_at_odd, largest, infinite, minus_zero, 1)
    np.testing.assert_array_equal(round_trip(edge), edge)


@pytest.mark.parametrize("nan", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_a_nan_stays_a_nan_in_the_upper_half(nan):
    value = ops.convert_to_tensor(words(nan).view("float32"))
    upper, _ = bits.split(value)
    assert np.isnan(ops.convert_to_numpy(ops.cast(upper, "float32"))[0])


@pytest.mark.costly
def test_the_upper_half_is_the_nearest_bfloat16():
    random = np.random.default_rng(0)
    value = ops.convert_to_tensor(random.normal(size=999).astype("float32"))
    upper, _ = bits.split(value)
    nearest = ops.cast(value, "bfloat16")
    np.testing.assert_array_equal(
        ops.convert_to_numpy(kernels.bitcast(upper, "uint16")),
        ops.convert_to_numpy(kernels.bitcast(nearest, "uint16")),
    )


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_fingerprint_changes_with_an_element_or_a_swap(dtype):
    first = np.arange(1.0, 7.0).reshape(2, 3)
    changed = first.copy()
    changed[1, 1] += 1.0
    swapped = first[::-1]

    def fingerprint(array):
        tensor = ops.convert_to_tensor(array, dtype)
        return int(bits.fingerprints([tensor])[0])

    assert fingerprint(first) == fingerprint(first.copy())
    assert fingerprint(first) != fingerprint(changed)
    assert fingerprint(first) != fingerprint(swapped)


@pytest.mark.costly
def test_compiled_fingerprints_of_many_match_those_of_each():
    random = np.random.default_rng(0)
    shapes = [(), (3,), (2, 3), (3,), (0, 2), *[(5, 1)] * 9, (2, 3)]
    tensors = [
        ops.convert_to_tensor(random.normal(size=shape), "bfloat16")
        for shape in shapes
    ]

    def together():
        return bits.fingerprints(tensors)

    compiled = steps.compiled(together, steps.MODES[-1])
    alone = [int(bits.fingerprints([one])[0]) for one in tensors]
    assert ops.convert_to_numpy(compiled()).tolist() == alone
