"""Calls do no work for gradients where nobody asks for any."""

import keras
import numpy as np
import pytest

import tfmix
from tests import helpers
from tfmix.gradient_scaling import weight_gradients

pytestmark = helpers.requires_backend("tensorflow")
PRODUCTS = ("contracted", "combined", "convolved")


def test_a_call_that_nobody_differentiates_makes_no_gradients(monkeypatch):
    import tensorflow as tf

    tfmix.set_global_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.Input((4, 4, 2)),
            keras.layers.Conv2D(2, 2),
            keras.layers.Dense(2),
        ]
    )
    x = tf.ones((1, 4, 4, 2))
    prepared = []
    for name in PRODUCTS:
        original = getattr(weight_gradients.products, name)

        def note(*args, original=original, **kwargs):
            prepared.append(original)
            return original(*args, **kwargs)

        monkeypatch.setattr(weight_gradients.products, name, note)
    expected = model(x)
    np.testing.assert_array_equal(tf.function(model)(x), expected)
    assert not prepared
    with tf.GradientTape():
        np.testing.assert_array_equal(model(x), expected)
    # A convolution and a product, with a bias each.
    assert len(prepared) == 4


class Sum(keras.layers.Layer):
    def __init__(self, compute, shape):
        super().__init__()
        self.compute = compute
        self.bias = self.add_weight(shape=shape, initializer="ones")

    def call(self, inputs):
        return self.compute(inputs, self.bias)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 2, 3), (4, 2, 3), ()])
@pytest.mark.parametrize("sign", ["plus", "minus", "of"])
def test_a_term_has_the_gradient_that_a_graph_has(sign, shape):
    import tensorflow as tf

    compute = {
        "plus": keras.ops.add,
        "minus": keras.ops.subtract,
        "of": lambda x, bias: keras.ops.subtract(bias, x),
    }[sign]
    tfmix.set_global_policy("mixed_bfloat16")
    layer = Sum(compute, shape)
    x = tf.reshape(tf.range(6.0), (1, 2, 3))

    def gradients():
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.cast(y, "float32") * tf.range(3.0))
        return tape.gradient(loss, [x, layer.bias.value])

    found, expected = gradients(), tf.function(gradients)()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
