"""A finite constant that a Keras op meets stays finite in 16 bit."""

import importlib

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers

ON_JAX = keras.backend.backend() == "jax"
MODES = ["eager", "jit"] if ON_JAX else ["eager", "graph", "jit"]
HALF = np.array([1.0, 0.0, -2.0, 60000.0], "float16")
TINY = 2.0**-14


def raw():
    """Returns TensorFlow, or `jax.numpy`, as users import it."""
    if ON_JAX:
        return importlib.import_module("jax.numpy")
    return importlib.import_module("tensorflow")


# Maps an op to its constant beside float16 numbers, and to its result.
MEETINGS = {
    "a_product": (lambda x: ops.multiply(x, -1e9), [-32752, 0, 32752, -32752]),
    "a_sum": (lambda x: ops.add(-1e9, x), [-32752] * 4),
    "a_difference": (lambda x: ops.subtract(x, 1e9), [-32752] * 4),
    "an_integer": (lambda x: ops.add(x, -(10**9)), [-32752] * 4),
    "an_integer_of_numpy": (
        lambda x: ops.multiply(x, np.int64(-(10**9))),
        [-32752, 0, 32752, -32752],
    ),
    "a_quotient": (lambda x: ops.divide(x, 1e5), HALF.astype("f4") / 1e5),
    "a_choice": (
        lambda x: ops.where(ops.abs(x) > 1, x, -1e9),
        [-32752, -32752, -2, 60000],
    ),
    "a_maximum": (lambda x: ops.maximum(x, 1e9), [32752] * 4),
    "a_minimum": (lambda x: ops.minimum(x, 1e9), HALF),
    "a_clip": (lambda x: ops.clip(x, -1e9, 1e9), HALF),
    "alike": (lambda x: ops.full_like(x, -1e9), [-32752] * 4),
    "full": (lambda x: ops.full((4,), -1e9, dtype=x.dtype), [-32752] * 4),
    "cast": (lambda x: x * 0 + ops.cast(-1e9, x.dtype), [-32752] * 4),
    "converted": (
        lambda x: x * 0 + ops.convert_to_tensor(-1e9, dtype=x.dtype),
        [-32752] * 4,
    ),
    "cast_from_numpy": (
        lambda x: x * 0 + ops.cast(np.float32(-1e9), x.dtype),
        [-32752] * 4,
    ),
    "infinity": (lambda x: ops.add(x, -float("inf")), [-np.inf] * 4),
    "an_operator": (lambda x: x * -1e9, [-32752, 0, 32752, -32752]),
    "an_operator_from_the_right": (lambda x: -1e9 + x, [-32752] * 4),
    "a_difference_from_the_right": (lambda x: 1e9 - x, [32752] * 4),
    "an_operator_that_fits": (lambda x: x / 1e5, HALF.astype("f4") / 1e5),
    "an_operator_with_numpy": (lambda x: x - np.int64(10**9), [-32752] * 4),
    "raw_where": (lambda x: raw().where(x > 1, x, -1e9), [-32752] * 3 + [6e4]),
    "an_epsilon": (lambda x: ops.add(x, 1e-9), [1, TINY, -2, 60000]),
    "a_product_that_is_zero": (lambda x: x * 1e-9, [0, 0, 0, 6e-5]),
    "an_operator_with_an_epsilon": (lambda x: 1e-9 + x, [1, TINY, -2, 60000]),
    "a_clip_at_an_epsilon": (
        lambda x: ops.clip(x, 1e-9, 1.0),
        [1, TINY, TINY, 1],
    ),
    "a_choice_of_an_epsilon": (
        lambda x: ops.where(x > 0, x, -1e-9),
        [1, -TINY, -TINY, 60000],
    ),
    "an_epsilon_that_is_cast": (
        lambda x: ops.maximum(x, ops.cast(1e-9, x.dtype)),
        [1, TINY, TINY, 60000],
    ),
    "full_of_epsilons": (lambda x: ops.full_like(x, 1e-9), [TINY] * 4),
    "raw_where_with_an_epsilon": (
        lambda x: raw().where(x > 0, x, 1e-9),
        [1, TINY, TINY, 60000],
    ),
    "a_maximum_with_an_epsilon": (
        lambda x: ops.maximum(x, 1e-9),
        [1, TINY, TINY, 60000],
    ),
}


def in_mode(function, mode, *args):
    if mode == "eager":
        return function(*args)
    if ON_JAX:
        import jax

        return jax.jit(function)(*args)
    import tensorflow as tf

    return tf.function(function, jit_compile=mode == "jit")(*args)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MEETINGS)
def test_a_constant_beyond_float16_saturates(name, mode):
    function, expected = MEETINGS[name]
    tfmix.set_global_policy("mixed_float16")
    found = in_mode(function, mode, ops.convert_to_tensor(HALF))
    assert keras.backend.standardize_dtype(found.dtype) == "float16"
    expected = np.asarray(expected, "float16")
    np.testing.assert_array_equal(ops.convert_to_numpy(found), expected)


def test_a_product_that_float16_holds_is_exact():
    tfmix.set_global_policy("mixed_float16")
    x = ops.convert_to_tensor(np.float16([2**-10]))
    assert float(ops.multiply(x, 2.0**20)[0]) == 2.0**10


@pytest.mark.skipif(ON_JAX, reason="names functions of TensorFlow")
def test_a_constant_that_tensorflow_converts_is_finite():
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    for make in (tf.cast, tf.constant):
        assert float(make(-1e9, tf.float16)) == -32752.0
    assert float(tf.ones((), tf.float16) * np.float64(-1e9)) == -32752.0


@pytest.mark.skipif(ON_JAX, reason="runs a tape of TensorFlow")
def test_an_epsilon_has_the_gradient_of_a_sum():
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    x = tf.constant([0.0, 1.0], tf.float16)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x + 1e-9
    np.testing.assert_array_equal(tape.gradient(y, x), [1.0, 1.0])


def test_infinite_and_missing_numbers_stay_so():
    tfmix.set_global_policy("mixed_float16")
    x = ops.convert_to_tensor(np.float16([np.inf, -np.inf, np.nan]))
    found = ops.convert_to_numpy(ops.multiply(x, 1e9))
    np.testing.assert_array_equal(found, np.float16([np.inf, -np.inf, np.nan]))


def test_a_constant_beyond_bfloat16_saturates():
    largest = float(np.finfo("float32").max)
    tfmix.set_global_policy("mixed_bfloat16")
    x = ops.ones((1,), dtype="bfloat16")
    found = ops.cast(ops.where(x > 2, x, -largest), "float32")
    assert np.isfinite(ops.convert_to_numpy(found)).all()
    assert ops.add(x, -1e9)[0] == ops.cast(-1e9, "bfloat16")


def test_float32_alone_stays_as_it_is():
    tfmix.set_global_policy("mixed_float16")
    assert float(ops.multiply(ops.ones(()), -1e9)) == -1e9


def test_switched_off_it_is_infinite_as_in_keras():
    tfmix.set_global_policy("mixed_float16")
    tfmix.set_global_policy("float32")
    x = ops.convert_to_tensor(HALF)
    for found in (ops.multiply(x, -1e9), x * -1e9):
        assert np.isneginf(ops.convert_to_numpy(found)[0])


@keras.saving.register_keras_serializable("tests")
class Masked(layers.Layer):
    """Does the same in a `call`, with ops."""

    def call(self, scores, mask):
        return masked(scores, mask)


def masked(scores, mask):
    return scores + (1 - ops.cast(mask, scores.dtype)) * -1e9


def masked_with_where(scores, mask):
    return ops.where(mask, scores, -1e9)


MASKS = {
    "operators": masked,
    "where": masked_with_where,
    "call": lambda scores, mask: Masked()(scores, mask),
}
ROWS, LENGTH = 64, 6
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, 20, (ROWS, LENGTH))
# One row has no token at all.
TOKENS[:, 4:], TOKENS[0] = 0, 0
TARGETS = (TOKENS[:, :1] > 9).astype("float32")


def attention(mask_scores):
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(20, 16)(tokens)
    query, key = layers.Dense(16)(x), layers.Dense(16)(x)
    scores = ops.matmul(query, ops.transpose(key, (0, 2, 1))) / 4
    mask = ops.expand_dims(ops.not_equal(tokens, 0), 1)
    weights = ops.softmax(mask_scores(scores, mask))
    pooled = layers.GlobalAveragePooling1D()(ops.matmul(weights, x))
    logits = layers.Dense(1, dtype="float32")(pooled)
    return keras.Model(tokens, [logits, weights])


def trained(policy, name, mode):
    tfmix.set_global_policy(policy)
    model = attention(MASKS[name])
    by_mode = {"eager": {"run_eagerly": True}, "jit": {"jit_compile": True}}
    model.compile(
        keras.optimizers.Adam(0.01),
        [keras.losses.BinaryCrossentropy(from_logits=True), None],
        **by_mode.get(mode, {"jit_compile": False}),
    )
    history = model.fit(
        TOKENS, TARGETS, epochs=3, batch_size=32, shuffle=False, verbose=0
    )
    _, weights = model(TOKENS)
    return history.history["loss"], ops.convert_to_numpy(weights)


@pytest.mark.costly
@pytest.mark.parametrize("mode", helpers.quick_are(MODES[-1:], MODES))
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_a_billion_trains_as_in_float32(name, mode):
    losses, weights = trained("float32", name, mode)
    found, found_weights = trained("mixed_float16", name, mode)
    np.testing.assert_allclose(found, losses, rtol=0.02)
    assert np.isfinite(found_weights[0]).all()
    assert (found_weights[1:, :, 4:] == 0).all()
