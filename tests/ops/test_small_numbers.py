"""Inputs of logarithms, roots and quotients have not been rounded."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers, loops, steps

NAMES = ("mixed_float16", "mixed_bfloat16")
# A gradient and a result are rounded to 16 bit once or twice.
ROUNDED = {"float16": {"rtol": 2e-3, "atol": 1e-6}}
ROUNDED["bfloat16"] = {"rtol": 2e-2, "atol": 1e-6}


def result_and_gradient(policy, function, x, mode):
    tfmix.set_global_policy(policy)
    model = keras.Sequential(
        [keras.Input(x.shape[1:]), helpers.Calls(function)]
    )

    def call(x):
        if helpers.ON_JAX:
            return model.stateless_call([], [], x)[0]
        return model(x)

    compute = steps.compiled(lambda x: helpers.with_gradients(call, x), mode)
    found = compute(ops.convert_to_tensor(x))
    return [helpers.to_numpy(each) for each in found]


def activations(dtype):
    """Returns 16-bit numbers, zeros in the first channel, small in others."""
    x = np.random.default_rng(0).normal(size=(4, 16, 6))
    x *= [0.0, 1e-3, 1e-2, 1.0, 1.0, 3.0]
    x[..., 3:] = np.abs(x[..., 3:])
    return np.array(ops.cast(ops.cast(x, dtype), "float32"))


def centred(t, axis):
    mean = ops.mean(t, axis, keepdims=True)
    return t - mean, ops.mean(ops.square(t - mean), axis, keepdims=True)


def batch_normalized(t):
    gap, variance = centred(t, 1)
    return gap * ops.rsqrt(variance + 1e-5)


def layer_normalized(t):
    gap, variance = centred(t, -1)
    return gap / ops.sqrt(variance + 1e-5)


def unit(t):
    return t / ops.sqrt(ops.sum(ops.square(t), -1, keepdims=True) + 1e-8)


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize(
    "normalized",
    [batch_normalized, layer_normalized, unit],
)
@pytest.mark.parametrize("name", NAMES)
def test_activations_divided_by_a_small_number_are_right(
    name, normalized, mode
):
    dtype = name.removeprefix("mixed_")
    x = activations(dtype)
    # A row without a signal, as behind a relu.
    x[:, 3] = 0.0

    def cubed(t):
        return ops.power(normalized(t), 3)

    right = result_and_gradient("float32", cubed, x, "eager")
    found = result_and_gradient(name, cubed, x, mode)
    for actual, expected in zip(found, right, strict=True):
        largest = np.abs(expected).max()
        rounded = 4 * ROUNDED[dtype]["rtol"] * largest
        np.testing.assert_allclose(actual, expected, atol=rounded, rtol=0)


class OwnGradient(layers.Layer):
    """Adds the gradient of a tensor that its code computes and watches."""

    def __init__(self, inner, outer):
        super().__init__()
        self.inner, self.outer = inner, outer

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3), name="kernel")

    def call(self, x):
        import tensorflow as tf

        within = self.inner(x, self.kernel)
        with tf.GradientTape() as tape:
            tape.watch(within)
            y = self.outer(x, within)
        found = tf.convert_to_tensor(tape.gradient(y, within))
        return ops.sum(y) + ops.sum(ops.square(found))


# What the layer watches, and what it computes of that.
WATCHED = {
    "a weight in a product": (
        lambda x, w: w * 0.5,
        lambda x, h: ops.tanh(x @ h),
    ),
    "a small number in a root": (
        lambda x, w: ops.square(x),
        lambda x, h: x / ops.sqrt(ops.sum(h, -1, keepdims=True) + 0.1),
    ),
}


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_may_differentiate_by_a_tensor_in_between(watched, mode, name):
    x = np.random.default_rng(1).uniform(0.3, 1.0, (3, 3)).astype("float32")

    def found(name):
        tfmix.set_global_policy(name)
        layer = OwnGradient(*WATCHED[watched])
        model = keras.Sequential([keras.Input((3,)), layer])
        layer.kernel.assign(x[::-1] - 0.6)

        def loss():
            return ops.cast(model(x, training=True), "float32")

        slope = loops.gradients(loss, [layer.kernel], mode)[0]
        return loss(), 0.0 if slope is None else slope

    for actual, expected in zip(found(name), found("float32"), strict=True):
        largest = np.abs(expected).max()
        rounded = 4 * ROUNDED[name.removeprefix("mixed_")]["rtol"] * largest
        np.testing.assert_allclose(actual, expected, atol=rounded, rtol=0)
