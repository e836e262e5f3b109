"""A constant that 16 bit cannot hold widens the op that meets it."""

import importlib

import numpy as np
import pytest
from keras import ops

import tfmix
from tests import helpers, steps

HALF = np.array([1.0, 0.0, -2.0, 60000.0], "float16")


def raw():
    """Returns TensorFlow, or `jax.numpy`, as users import it."""
    name = "jax.numpy" if helpers.ON_JAX else "tensorflow"
    return importlib.import_module(name)


def in_place(x):
    y = x
    y *= 1e5
    y *= 1e-5
    return y


# These meet a constant that float16 cannot hold, or that it rounds to zero.
WIDENED = {
    "a_product": lambda x: ops.multiply(x, -1e9),
    "a_sum": lambda x: ops.add(-1e9, x),
    "an_integer": lambda x: ops.add(x, -(10**9)),
    "a_quotient": lambda x: ops.divide(x, 1e5),
    "a_choice": lambda x: ops.where(ops.abs(x) > 1, x, -1e9),
    "a_maximum": lambda x: ops.maximum(x, 1e9),
    "a_clip": lambda x: ops.clip(x, -1e9, 1e9),
    "alike": lambda x: ops.full_like(x, -1e9),
    "an_operator": lambda x: x * -1e9,
    "an_operator_from_the_right": lambda x: -1e9 + x,
    "an_operator_that_fits": lambda x: x / 1e5,
    "raw_where": lambda x: raw().where(x > 1, x, -1e9),
    "an_epsilon": lambda x: ops.add(x, 1e-9),
    "a_maximum_with_an_epsilon": lambda x: ops.maximum(x, 1e-9),
    "a_modulo": lambda x: x % 1e5,
    "one_after_another": in_place,
    "full": lambda x: ops.full((4,), -1e9, dtype=x.dtype),
    "cast": lambda x: ops.cast(-1e9, x.dtype) + ops.zeros((4,), x.dtype),
    "converted": lambda x: x * 0 + ops.convert_to_tensor(-1e9, dtype=x.dtype),
    "an_epsilon_that_is_cast": lambda x: ops.maximum(
        x, ops.cast(1e-9, x.dtype)
    ),
}


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("name", WIDENED)
def test_an_op_with_a_constant_beyond_float16_returns_float32(name, mode):
    function = WIDENED[name]
    expected = function(ops.convert_to_tensor(HALF.astype("float32")))
    tfmix.set_global_policy("mixed_float16")
    found = steps.compiled(function, mode)(ops.convert_to_tensor(HALF))
    assert helpers.dtype_of(found) == "float32"
    np.testing.assert_allclose(found, expected, rtol=1e-6)


HELD = {
    "infinity": (lambda x: ops.add(x, -float("inf")), [-np.inf] * 4),
    "what_float16_holds": (lambda x: x * 2.0**-24, [2.0**-24, 0, -(2.0**-23)]),
}


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("name", HELD)
def test_an_op_with_a_constant_that_float16_holds_returns_float16(name, mode):
    function, expected = HELD[name]
    tfmix.set_global_policy("mixed_float16")
    found = steps.compiled(function, mode)(ops.convert_to_tensor(HALF))
    assert helpers.dtype_of(found) == "float16"
    expected = np.asarray(expected, "float16")
    found = ops.convert_to_numpy(found)[: len(expected)]
    np.testing.assert_array_equal(found, expected)


@helpers.requires_backend("tensorflow")
def test_a_constant_that_tensorflow_converts_is_finite():
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    for make in (tf.cast, tf.constant):
        assert float(make(-1e9, tf.float16)) == -1e9
    assert float(tf.ones((), tf.float16) * np.float64(-1e9)) == -1e9


def test_an_epsilon_has_the_gradient_of_a_sum():
    tfmix.set_global_policy("mixed_float16")
    x = np.float16([0.0, 1.0])
    _, gradient = helpers.with_gradients(lambda x: x + 1e-9, x)
    np.testing.assert_array_equal(gradient, [1.0, 1.0])


def test_infinite_numbers_stay_infinite_and_nan_stays_nan():
    tfmix.set_global_policy("mixed_float16")
    for number in (np.inf, -np.inf, np.nan):
        found = float(ops.cast(np.float32(number), "float16"))
        np.testing.assert_equal(found, number)


def test_a_constant_beyond_bfloat16_is_finite():
    largest = float(np.finfo("float32").max)
    tfmix.set_global_policy("mixed_bfloat16")
    x = ops.ones((1,), dtype="bfloat16")
    assert ops.where(x > 2, x, -largest)[0] == -largest
    found = ops.cast(ops.cast(-largest, "bfloat16"), "float32")
    assert np.isfinite(ops.convert_to_numpy(found)).all()
    assert ops.add(x, -1e9)[0] == ops.cast(-1e9, "bfloat16")


def test_a_constant_is_infinite_again_after_the_policy():
    tfmix.set_global_policy("mixed_float16")
    tfmix.set_global_policy("float32")
    x = ops.convert_to_tensor(HALF)
    for found in (ops.multiply(x, -1e9), x * -1e9):
        assert np.isneginf(ops.convert_to_numpy(found)[0])


POSITIONS = {
    "up to the last": (lambda n, dtype: ops.arange(n, dtype=dtype), 0),
    "from a start": (lambda n, dtype: ops.arange(9, n, dtype=dtype), 0),
    "one more": (lambda n, dtype: ops.arange(n + 1, dtype=dtype), 1),
    "backwards": (lambda n, dtype: ops.arange(n + 1, 0, -1, dtype), 1),
    "of a traced length": (
        lambda n, dtype: ops.arange(
            n + 1 if helpers.ON_JAX else ops.convert_to_tensor(n),
            dtype=dtype,
        ),
        1,
    ),
}


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("exact", [("float16", 2048), ("bfloat16", 256)])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_that_16_bit_rounds_are_float32(name, exact, mode):
    (dtype, last), (make, is_wide) = exact, POSITIONS[name]
    tfmix.set_global_policy(f"mixed_{dtype}")
    if mode == "xla" and name == "of a traced length":
        pytest.skip("XLA compiles no tensor of an unknown size")
    found = steps.compiled(lambda: make(last, dtype), mode)()
    assert helpers.dtype_of(found) == ("float32" if is_wide else dtype)
    wide = ops.convert_to_numpy(ops.cast(found, "float32"))
    assert len({*wide}) == len(wide)


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_sine_of_an_angle_that_was_cast_is_that_of_float32(policy, mode):
    angles = np.linspace(0, 5000, 64, dtype="float32")
    dtype = policy.removeprefix("mixed_")

    def table(x):
        narrow = ops.cast(x, dtype)
        return ops.sin(narrow), ops.cos(narrow)

    tfmix.set_global_policy(policy)
    found = steps.compiled(table, mode)(ops.convert_to_tensor(angles))
    for one, right in zip(found, (np.sin(angles), np.cos(angles)), strict=True):
        assert helpers.dtype_of(one) == dtype
        np.testing.assert_allclose(helpers.to_numpy(one), right, atol=4e-3)


def tiny():
    """Returns TensorFlow's own functions of an epsilon."""
    import tensorflow as tf

    return {
        "l2_normalize": lambda v: tf.math.l2_normalize(v, axis=-1),
        "of tf.nn": lambda v: tf.nn.l2_normalize(v, -1),
        "maximum": lambda v: v / tf.maximum(tf.norm(v), 1e-12),
        "of tf.math": lambda v: v / tf.math.maximum(tf.norm(v), 1e-12),
        "clip_by_value": lambda v: tf.math.log(tf.clip_by_value(v, 1e-8, 1)),
        "minimum": lambda v: 1 / tf.minimum(-1e-12, -v),
    }


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize(
    "name",
    ["l2_normalize", "of tf.nn", "maximum", "of tf.math", "clip_by_value"]
    + ["minimum"],
)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_an_epsilon_in_a_function_of_tensorflow_is_that_of_float32(
    name, policy
):
    x, found = np.zeros((2, 3), "float32"), []
    for each in ("float32", policy):
        tfmix.set_global_policy(each)
        layer = helpers.Calls(tiny()[name])
        found.append(helpers.to_numpy(layer(x)))
        assert layer.compute_dtype == each.removeprefix("mixed_")
    np.testing.assert_allclose(*found, rtol=1e-2)
