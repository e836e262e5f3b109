"""In TensorFlow's eager mode one record has both gradients of an op."""

import collections

import keras
import numpy as np
import pytest
from keras import layers

import tfmix
from tests import helpers

pytestmark = [
    helpers.requires_backend("tensorflow"),
    pytest.mark.every_case("each row is a rule of its own, and fast"),
]

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.framework import op_callbacks

RNG = np.random.default_rng(0)
OPS = {
    "a bias": ((8, 4), (4,), lambda x, w: x + w),
    "a repeated input": ((1, 4), (8, 4), lambda x, w: x + w),
    "less a weight": ((8, 4), (4,), lambda x, w: x - w),
    "a weight less an input": ((8, 4), (4,), lambda x, w: w - x),
    "a gain": ((8, 4), (4,), lambda x, w: x * w),
    "a product": ((8, 4), (4, 3), keras.ops.matmul),
    "rows in a stack": ((2, 8, 4), (4, 3), keras.ops.matmul),
}


class Applied(layers.Layer):
    """Computes an op of its input and a weight."""

    def __init__(self, op, value, **kwargs):
        super().__init__(**kwargs)
        self.op = op
        self.w = self.add_weight(shape=value.shape)
        self.w.assign(value)

    def call(self, x):
        return self.op(x, self.w)


def first_and_second(policy, name):
    """Returns both gradients of an op, and those of their squares' sum."""
    tfmix.set_global_policy(policy)
    of_input, of_weight, op = OPS[name]
    rng = np.random.default_rng(1)
    x = tf.constant(rng.normal(size=of_input).astype("float32"))
    layer = Applied(op, rng.normal(size=of_weight).astype("float32"))
    sources = [x, layer.w.value]
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_mean(tf.cast(layer(x), "float32") ** 2)
        first = inner.gradient(loss, sources)
        penalty = sum(tf.reduce_sum(tf.cast(g, "float32") ** 2) for g in first)
    second = outer.gradient(penalty, sources)
    return [helpers.to_numpy(g) for g in (*first, *second)]


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_both_orders_are_those_of_float32(name):
    exact = first_and_second("float32", name)
    found = first_and_second("mixed_float16", name)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=2e-3)


def operations(function):
    """Counts the operations that a second call of a function runs."""
    function()
    ran = collections.Counter()

    def note(kind, *_, **__):
        ran[kind if isinstance(kind, str) else kind.decode()] += 1

    op_callbacks.add_op_callback(note)
    try:
        function()
    finally:
        op_callbacks.remove_op_callback(note)
    return ran


def five_layers():
    tfmix.set_global_policy("mixed_float16")
    inner = [layers.Dense(32) for _ in range(5)]
    return keras.Sequential([keras.Input((32,)), *inner])


X = RNG.normal(size=(8, 32)).astype("float32")


def test_a_taped_gradient_runs_few_operations():
    model, x = five_layers(), tf.constant(X)

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    # Keras's policy runs 64.
    ran = operations(gradients)
    assert ran.total() <= 90, ran
    assert not ran["StopGradient"]
    assert not ran["BiasAddGrad"]


def test_an_eager_step_of_fit_runs_few_operations():
    model = five_layers()
    model.compile("adam", "mse", run_eagerly=True)
    model.train_on_batch(X, X)
    # Keras's policy with its own scaler runs 453.
    ran = operations(lambda: model.train_on_batch(X, X))
    assert ran.total() <= 475, ran
