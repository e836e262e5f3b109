"""8-bit codes: their range, their rounding and their stability."""

import functools
import math

import hypothesis
import keras
import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.extra import numpy as arrays
from keras import ops

from tfmix.optimizers import eight_bit, noise

CODES = {
    "signed": eight_bit.SIGNED,
    "unsigned": eight_bit.UNSIGNED,
    "signs": eight_bit.SIGNS,
}
# The blocks of these shapes, in turn: short rows, rows, and matrices.
SHAPES = {
    (7, 100): (7,),
    (2, 300): (2,),
    (3, 20, 13): (3,),
    (2, 3, 300): (2, 3),
}
NEAREST = np.int32(eight_bit.NEAREST)


@functools.cache
def both_ways(code):
    """Returns the function that encodes and decodes, compiled as in a step."""

    def both(value, noise):
        return eight_bit.decode(*eight_bit.encode(value, code, noise), code)

    if keras.backend.backend() != "jax":
        return both
    import jax

    return jax.jit(both)


def there_and_back(value, code, noise=NEAREST):
    """Encodes and decodes an array. The pieces of a vector are blocks."""
    value = np.array(value, "float32")
    rows = value
    if value.ndim == 1:
        rows = np.pad(value, (0, -value.size % eight_bit.BLOCK))
        rows = rows.reshape(-1, eight_bit.BLOCK)
    rows = ops.convert_to_tensor(rows)
    found = both_ways(code)(rows, ops.convert_to_tensor(noise))
    found = keras.ops.convert_to_numpy(found)
    return found.ravel()[: value.size].reshape(value.shape)


def expected(value, code):
    """The code in plain NumPy: one number at a time, rounded to nearest."""
    found = np.zeros(value.size, "float64")
    flat = value.ravel().astype("float64")
    length = value.size // math.prod(eight_bit.blocks_shape(value.shape))
    for start in range(0, flat.size, length):
        block = flat[start : start + length]
        largest = max(np.abs(block).max(), 2.0**-126)
        scale = 2.0 ** np.frexp(largest)[1]
        lowest = 2.0 ** (1 - code.octaves) * (1 + 1 / code.steps)
        for place, number in enumerate(block):
            size = abs(number) / scale
            if size < lowest:
                up = size > lowest / 2 if code.signed else size > 0
                size = lowest if up else 0.0
            else:
                step = 2.0 ** np.floor(np.log2(size)) / code.steps
                most = 2 - 1 / code.steps
                size = min(np.floor(size / step + 0.5) * step, most)
            found[start + place] = np.copysign(size, number) * scale
    return found.reshape(value.shape)


@pytest.mark.parametrize(("shape", "scales"), SHAPES.items())
def test_a_block_is_a_row_or_the_fewest_last_axes_of_256(shape, scales):
    assert eight_bit.blocks_shape(shape) == scales
    value = ops.ones(shape, "float32")
    _, found = eight_bit.encode(value, eight_bit.SIGNED, NEAREST)
    assert tuple(found.shape) == scales


@pytest.mark.costly
@pytest.mark.parametrize("name", CODES)
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    arrays.arrays(
        "float32",
        strategies.sampled_from([(1, 3), *SHAPES]),
        elements=strategies.floats(
            -(2.0**100), 2.0**100, width=32, allow_subnormal=False
        ),
        fill=strategies.just(0.0),
    )
)
def test_codes_match_a_plain_numpy_version(name, value):
    code = CODES[name]
    # Numbers that are subnormal in float32 may become 0 on any device.
    value = np.where(np.abs(value) < 2.0**-80, 0, value).astype("float32")
    if not code.signed:
        value = np.abs(value)
    np.testing.assert_allclose(
        there_and_back(value, code), expected(value, code), rtol=1e-6, atol=0
    )


@pytest.mark.costly
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_stochastic_rounding_is_right_in_the_mean(code):
    value = np.full(2**16, 0.3, "float32")
    value[:: eight_bit.BLOCK] = 1.0
    drawn = noise.noise(value.shape, ops.cast(5, "int32"), 0, 0)
    drawn = ops.reshape(drawn, (-1, eight_bit.BLOCK))
    found = there_and_back(value, code, keras.ops.convert_to_numpy(drawn))
    rest = np.delete(found, slice(0, None, eight_bit.BLOCK))
    step = 0.25 / code.steps
    below = np.floor(0.3 / step) * step
    assert set(rest) == {np.float32(below), np.float32(below + step)}
    assert rest.mean() == pytest.approx(0.3, abs=0.01 * step)


def test_a_negative_second_moment_becomes_zero():
    assert there_and_back([1.0, -1.0], eight_bit.UNSIGNED)[1] == 0


@pytest.mark.costly
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_nan_and_infinity_only_affect_their_block(bad, code):
    value = np.ones(600, "float32")
    value[300] = bad
    finite = np.isfinite(there_and_back(value, code))
    assert finite[:256].all()
    assert finite[512:].all()
    assert not finite[256:512].any()


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_numbers_up_to_the_last_power_of_two_fit(code):
    value = np.array([1.7e38, 1e37, 0.0], "float32")
    np.testing.assert_allclose(
        there_and_back(value, code), value, rtol=1 / code.steps
    )


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("largest", [0.0, 1e-37, 1e-20, 1.0])
def test_zero_has_the_code_0(code, largest):
    # A GPU keeps subnormals, and Lion would use their signs.
    value = ops.convert_to_tensor(np.float32([[largest] + [0.0] * 511]))
    codes, _ = eight_bit.encode(value, code, ops.convert_to_tensor(NEAREST))
    assert not np.any(ops.convert_to_numpy(codes)[0, 1:])
