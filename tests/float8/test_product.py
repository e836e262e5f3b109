"""The float8 product agrees bit for bit with its definition in NumPy."""

import itertools
import re

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

from tests import helpers, steps
from tfmix._keras import context
from tfmix.float8 import product

NARROW = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
FLIPPED = list(itertools.product([False, True], repeat=2))


def expected_factor(values, to):
    """Returns a factor rounded to float8, as float64, and its exponent."""
    values = np.asarray(values, "float64")
    mantissa, exponent = np.frexp(np.abs(values).max())
    # NumPy's mantissa is in [0.5, 1), float8's in [1, 2).
    above = 2 * mantissa > 1.75
    power = to.exponent - (exponent - 1) - above
    scaled = (values * 2.0**power).astype("float32")
    return scaled.astype(NARROW[to.dtype]).astype("float64"), power


def expected(a, b, formats):
    """Returns the product, rounded to bfloat16."""
    narrow_a, power_a = expected_factor(a, formats[0])
    narrow_b, power_b = expected_factor(b, formats[1])
    exact = narrow_a @ narrow_b * 2.0 ** -(power_a + power_b)
    return exact.astype("float32").astype(ml_dtypes.bfloat16).astype("float32")


def with_gradients(a, b, upstream, **settings):
    """Returns the product and both gradients."""
    return helpers.with_gradients(
        lambda a, b: product.product(a, b, **settings), a, b, upstream=upstream
    )


def bfloat16(values):
    """Returns a tensor, and its exact values."""
    tensor = ops.cast(ops.convert_to_tensor(values, "float32"), "bfloat16")
    return tensor, helpers.to_numpy(tensor)


def numbers(rng, shape, size=1.0):
    return bfloat16(rng.normal(size=shape) * size)


@pytest.mark.costly
# Op by op, JAX compiles for four seconds.
@pytest.mark.parametrize("mode", [*steps.MODES[1:], steps.MODES[0]])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e28])
@pytest.mark.parametrize("transposed", FLIPPED)
def test_the_product_and_its_gradients_are_bit_exact(mode, size, transposed):
    rng = np.random.default_rng(3)
    a, exact_a = numbers(rng, (48, 16) if transposed[0] else (16, 48), size)
    b, exact_b = numbers(rng, (32, 48) if transposed[1] else (48, 32), 1 / size)
    g, exact_g = numbers(rng, (16, 32), 1e-6)
    step = steps.compiled(
        lambda *given: with_gradients(*given, transposed=transposed), mode
    )
    forward, gradient = product.FORWARD, product.GRADIENT
    left = exact_a.T if transposed[0] else exact_a
    right = exact_b.T if transposed[1] else exact_b
    to_a = expected(exact_g, right.T, (gradient, forward))
    to_b = expected(left.T, exact_g, (forward, gradient))
    wanted = [
        expected(left, right, (forward, forward)),
        to_a.T if transposed[0] else to_a,
        to_b.T if transposed[1] else to_b,
    ]
    for one, right_one in zip(step(a, b, g), wanted, strict=True):
        np.testing.assert_array_equal(helpers.to_numpy(one), right_one)


@pytest.mark.parametrize("to", [product.FORWARD, product.GRADIENT])
@pytest.mark.parametrize(
    "largest", [1.0, 1.75, 1.7578125, 2.0, 2.0**-130, 3e38, 0.0]
)
def test_a_factor_takes_the_whole_range_and_never_overflows(to, largest):
    tensor, exact = bfloat16([[0.0, -largest / 2], [largest, 0.0]])
    narrow, powers = product.rounded(tensor, to)
    found = helpers.to_numpy(narrow)
    assert np.isfinite(found).all()
    limit = 1.75 * 2.0**to.exponent
    assert np.abs(found).max() <= limit
    if largest > 1e-30:
        assert np.abs(found).max() >= limit / 2
    scale, *inverse = helpers.to_numpy(powers)
    assert scale * np.prod(inverse) == 1
    # Compilers may flush subnormal numbers to zero.
    np.testing.assert_allclose(found / scale, exact, 2**-3, 2.0**-126)


@pytest.mark.costly
def test_a_scale_covers_any_number_of_rows():
    # The amax is in one of the rows that are joined.
    ones = np.ones((2**14, 2))
    tall, exact = bfloat16(np.r_[ones, [[3.0, 48.0]] * 2, ones])
    narrow, powers = product.rounded(tall, product.FORWARD)
    expected, power = expected_factor(exact, product.FORWARD)
    assert float(helpers.to_numpy(powers)[0]) == 2.0**power
    found = helpers.to_numpy(narrow)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.costly
@pytest.mark.parametrize("mode", steps.MODES)
def test_a_long_product_is_summed_in_float32(mode):
    # float32 can hold sums of these whole numbers, but bfloat16 cannot.
    rng = np.random.default_rng(5)
    a, exact_a = bfloat16(rng.integers(-8, 9, (16, 4096)))
    b, exact_b = bfloat16(rng.integers(-8, 9, (4096, 16)))
    found = steps.compiled(product.product, mode)(a, b)
    np.testing.assert_array_equal(
        helpers.to_numpy(found),
        expected(exact_a, exact_b, (product.FORWARD, product.FORWARD)),
    )


@pytest.mark.costly
@pytest.mark.parametrize("mode", steps.MODES)
def test_float32_factors_give_a_float32_product(mode):
    a = ops.convert_to_tensor(np.float32([[16.0, 1.0]]))
    found = steps.compiled(product.product, mode)(a, ops.transpose(a))
    # The result has nine bits. In bfloat16 it would be 256.
    assert helpers.to_numpy(found).tolist() == [[257]]


@pytest.mark.costly
@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nan_and_infinity_pass_through_the_product(mode, bad):
    values = np.ones((16, 16), "float32")
    values[3, 4] = bad
    a, _ = bfloat16(values)
    b, _ = bfloat16(np.ones((16, 16)))
    found, to_a, to_b = steps.compiled(with_gradients, mode)(b, a, b)
    assert not np.isfinite(helpers.to_numpy(found)).all()
    assert not np.isfinite(helpers.to_numpy(to_a)).all()
    assert np.isfinite(helpers.to_numpy(to_b)).all()


@pytest.mark.costly
@pytest.mark.parametrize("mode", steps.MODES)
def test_a_gradient_of_a_gradient_is_one_of_products(mode):
    # The second derivative of the squared sum of a b is 2 (sum of b's rows)^2.
    a, exact_a = bfloat16(np.ones((16, 16)))
    b, exact_b = bfloat16(np.full((16, 16), 0.5))

    def slope(a):
        squares = helpers.with_gradients(
            lambda a: ops.square(product.product(a, b)), a
        )
        return squares[1]

    def penalty(a):
        return helpers.with_gradients(lambda a: ops.square(slope(a)), a)[1]

    found = helpers.to_numpy(steps.compiled(penalty, mode)(a))
    gram = exact_b @ exact_b.T
    np.testing.assert_allclose(found, 8 * exact_a @ gram @ gram, rtol=0.02)


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("jit", [False, True])
def test_a_batch_may_be_of_any_size(jit):
    import tensorflow as tf

    kernel, exact = numbers(np.random.default_rng(1), (16, 32))
    step = tf.function(
        lambda x: product.product(x, kernel),
        jit_compile=jit,
        input_signature=[tf.TensorSpec((None, 16), tf.bfloat16)],
    )
    for rows in (1, 7, 64):
        x, exact_x = numbers(np.random.default_rng(rows), (rows, 16))
        formats = (product.FORWARD, product.FORWARD)
        np.testing.assert_array_equal(
            helpers.to_numpy(step(x)),
            expected(exact_x, exact, formats),
        )


def lowered(platform, *arguments, devices=1):
    """Returns the program of a product and both gradients for a platform."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        step = tf.function(with_gradients, jit_compile=True, autograph=False)
        with context.compiled_for(platform):
            return step.experimental_get_compiler_ir(*arguments)(stage="hlo")
    import jax

    mesh = jax.sharding.Mesh(jax.devices()[:devices], "x")
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    step = jax.jit(with_gradients, in_shardings=rows).trace(*arguments)
    return step.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.every_case("a faulty case is 30 % slower on a GPU, and right")
@pytest.mark.parametrize(
    ("platform", "devices", "named", "by_rows"),
    [
        ("cuda", 1, 3, 6),
        pytest.param(*("cuda", 2, 3, 0), marks=helpers.requires_backend("jax")),
        ("cpu", 1, 0, 0),
    ],
)
def test_a_gpu_gets_a_fixed_algorithm_and_layout(
    platform, devices, named, by_rows
):
    # Without an algorithm XLA times its own kernels, which takes minutes.
    # Without a layout it transposes each weight in a kernel of its own. Several
    # devices would exchange the matrices for the layout.
    matrix = ops.ones((32, 32), "bfloat16")
    text = lowered(platform, matrix, matrix, matrix, devices=devices)
    algorithms = re.findall("dot_any_f8_any_f8|lhs_precision_type = f8E", text)
    assert len(algorithms) == named
    assert len(re.findall('[@"]LayoutConstraint', text)) == by_rows
