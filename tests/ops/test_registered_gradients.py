"""A gradient goes through the operations of the forward pass.

Packages that explain or measure models replace the gradient that TensorFlow
has registered for a type of operation, and look at the inputs of each.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.framework import ops as framework_ops

import tfmix
from tests import helpers
from tfmix.ops import tensorflow_products

pytestmark = helpers.requires_backend("tensorflow")
PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D")


class Own(layers.Layer):
    """Multiplies by its own weight, from either side."""

    def build(self, shape):
        self.first = self.add_weight(shape=(shape[-1], 4))
        self.second = self.add_weight(shape=(3, shape[-2]))

    def call(self, x):
        return ops.matmul(self.second, ops.matmul(x, self.first))


# Each with the shape of a batch, and the number of products.
MODELS = {
    "Dense": (lambda: [layers.Dense(4, "tanh"), layers.Dense(3)], (2, 5), 2),
    "EinsumDense": (
        lambda: [layers.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d")],
        (2, 5, 3),
        1,
    ),
    "matmul": (lambda: [Own()], (2, 5, 3), 2),
    "Conv2D": (
        lambda: [layers.Conv2D(4, 3, activation="tanh"), layers.Conv2D(3, 1)],
        (2, 6, 6, 3),
        2,
    ),
}


@contextlib.contextmanager
def doubled(is_forward):
    """Doubles the gradients of products with inputs of the forward pass."""
    registry = framework_ops._gradient_registry._registry
    rows = [registry[name] for name in PRODUCTS if name in registry]
    own = [row["type"] for row in rows]

    def of(original):
        def gradient(op, *upstream):
            factor = 2.0 if all(map(is_forward, op.inputs)) else float("nan")
            return original(op, *(factor * each for each in upstream))

        return gradient

    for row, original in zip(rows, own, strict=True):
        row["type"] = of(original)
    try:
        yield
    finally:
        for row, original in zip(rows, own, strict=True):
            row["type"] = original


def attributions(name, policy, is_model):
    """Returns the gradient of the inputs, with those of products doubled."""
    tfmix.set_global_policy(policy)
    make, shape, _ = MODELS[name]
    keras.utils.set_random_seed(1)
    stack = make()
    call = keras.Sequential([keras.Input(shape[1:]), *stack])
    if not is_model:

        def call(x):
            for layer in stack:
                x = layer(x)
            return x

    forward = set()

    @tf.function(autograph=False)
    def explain(x):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.cast(call(x), tf.float32) ** 2)
        made = tf.compat.v1.get_default_graph().get_operations()
        forward.update(tensor.name for op in made for tensor in op.outputs)
        return tape.gradient(total, x)

    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    with doubled(lambda tensor: tensor.name in forward):
        return explain(tf.constant(x)).numpy()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("is_model", [True, False])
def test_a_replaced_gradient_meets_the_forward_pass(name, policy, is_model):
    exact = attributions(name, "float32", is_model)
    found = attributions(name, policy, is_model)
    scale = np.abs(exact).max()
    dtype = policy.removeprefix("mixed_")
    helpers.assert_close(found / scale, exact / scale, dtype)


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_that_is_not_replaced_is_not_doubled(name):
    exact = attributions(name, "float32", False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.ops.test_registered_gradients.PRODUCTS", ())
        plain = attributions(name, "float32", False)
    np.testing.assert_allclose(exact, plain * 2 ** MODELS[name][2], rtol=1e-5)


@pytest.mark.parametrize("is_asked", [True, False])
def test_an_eager_tape_forms_the_weight_gradient_only_if_asked(
    is_asked, monkeypatch
):
    made = []
    original = tensorflow_products._summed
    monkeypatch.setattr(
        tensorflow_products,
        "_summed",
        lambda *args, **kwargs: made.append(1) or original(*args, **kwargs),
    )
    tfmix.set_global_policy("mixed_bfloat16")
    dense = layers.Dense(3, use_bias=False)
    dense.build((None, 2))
    x = tf.ones((4, 2))
    with tf.GradientTape(watch_accessed_variables=is_asked) as tape:
        tape.watch(x)
        total = tf.reduce_sum(dense(x))
    slope = tape.gradient(total, x)
    expected = ops.sum(ops.cast(dense.kernel, "bfloat16"), axis=-1)
    helpers.assert_close(slope[0], expected, "bfloat16")
    assert len(made) == is_asked
