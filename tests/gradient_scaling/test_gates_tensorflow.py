"""A `tf.function` that is called without a tape first is right under a tape."""

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers

pytestmark = helpers.requires_backend("tensorflow")

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    from tfmix._keras import tapes

X = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
Y = np.random.default_rng(1).normal(3.0, size=(64, 1)).astype("float32")
# Float16 without gates loses the first and overflows at the last.
FACTORS = (1e-6, 1e6)


def network():
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(32, "tanh")
    return keras.Sequential([keras.Input((16,)), hidden, layers.Dense(1)])


def whole_model(model):
    return lambda x: model(x)


def nested(model):
    inner = tf.function(whole_model(model))
    return lambda x: inner(x)


def a_branch(model):
    return lambda x: tf.cond(
        tf.reduce_sum(x) > 1e6, lambda: x[:, :1], lambda: model(x)
    )


FORMS = (whole_model, nested, a_branch)


def gradients_after_a_call(policy, form, factor, jit_compile=False):
    """Calls a function without a tape, then takes gradients of it."""
    tfmix.set_global_policy(policy)
    model = network()
    function = tf.function(form(model), jit_compile=jit_compile)
    function(X)
    with tf.GradientTape() as tape:
        loss = factor * tf.reduce_mean((function(X) - Y) ** 2)
    return tape.gradient(loss, model.trainable_variables)


@pytest.mark.costly
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_gradients_after_a_call_without_a_tape_are_those_of_float32(
    policy, form, factor, jit_compile
):
    within = 0.005 if policy == "mixed_float16" else 0.02
    right = gradients_after_a_call("float32", form, factor)
    found = gradients_after_a_call(policy, form, factor, jit_compile)
    for a, b in zip(right, found, strict=True):
        assert np.linalg.norm(a - b) < within * np.linalg.norm(a)


def test_each_way_to_call_a_function_has_one_trace():
    traces = []
    tfmix.set_global_policy("mixed_float16")
    model = network()

    @tf.function
    def function(x):
        traces.append(tapes.may_be_asked())
        return model(x)

    for _ in range(2):
        function(X)
        with tf.GradientTape():
            function(X)
    assert traces == [False, True]


def test_without_a_policy_a_function_is_traced_once():
    traces = []
    tfmix.set_global_policy("float32")
    function = tf.function(lambda x: traces.append(x) or x)
    function(tf.constant(1.0))
    with tf.GradientTape():
        function(tf.constant(1.0))
    assert len(traces) == 1


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_loss_may_gather_rows_of_a_result(compiled, factor):
    def gradients(policy):
        tfmix.set_global_policy(policy)
        model = network()

        def compute(rows):
            with tf.GradientTape() as tape:
                some = tf.gather(model(X), rows)
                loss = factor * tf.reduce_mean(some**2)
            return tape.gradient(loss, model.trainable_variables)

        compute = tf.function(compute) if compiled else compute
        return compute(tf.constant([3, 1, 3]))

    expected = gradients("float32")
    for a, b in zip(expected, gradients("mixed_float16"), strict=True):
        assert np.linalg.norm(a - b) < 0.005 * np.linalg.norm(a)
