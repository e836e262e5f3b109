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


def generalised_mean(power, constant):
    def pool(t):
        powers = ops.power(ops.maximum(t, constant), power)
        return ops.power(ops.mean(powers, 1), 1 / power)

    return pool


FUNCTIONS = {
    "log": lambda t: ops.log(ops.mean(ops.square(t), 1) + 1e-6),
    "log of 1e-10": lambda t: ops.log(ops.mean(ops.square(t), 1) + 1e-10),
    "log of a relu": lambda t: ops.log(ops.relu(t) + 1e-6),
    "operators": lambda t: ops.log(ops.mean(t * t, 1) + 1e-10),
    "power": lambda t: ops.log(ops.sum(t**2, 1) + 1e-10),
    "used by a product": lambda t: ops.matmul(
        ops.log(ops.mean(ops.square(t), 1) + 1e-6), ops.ones((6, 2), t.dtype)
    ),
    "root": lambda t: ops.sqrt(ops.sum(ops.square(t), 1) + 1e-12),
    "entropy": lambda t: (
        -ops.sum(ops.softmax(8 * t) * ops.log(ops.softmax(8 * t) + 1e-10), 1)
    ),
    **{
        f"mean of powers {power}, {constant}": generalised_mean(power, constant)
        for power in (2, 3)
        for constant in (1e-6, 1e-3)
    },
}


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


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_small_numbers_and_their_gradients_are_those_of_float32(
    name, function, mode
):
    dtype = name.removeprefix("mixed_")
    if function == "log of a relu" and dtype == "float16":
        if not helpers.ON_JAX and mode != "xla":
            pytest.skip("TensorFlow's relu multiplies infinity by 0 on a CPU")
    x = activations(dtype)
    right = result_and_gradient("float32", FUNCTIONS[function], x, "eager")
    found = result_and_gradient(name, FUNCTIONS[function], x, mode)
    for actual, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(actual, expected, **ROUNDED[dtype])
    assert not found[1][..., 0].any() or function == "entropy"


def centred(t, axis):
    mean = ops.mean(t, axis, keepdims=True)
    return t - mean, ops.mean(ops.square(t - mean), axis, keepdims=True)


def batch_normalized(t):
    gap, variance = centred(t, 1)
    return gap * ops.rsqrt(variance + 1e-5)


def layer_normalized(t):
    gap, variance = centred(t, -1)
    return gap / ops.sqrt(variance + 1e-5)


def root_mean_square_normalized(t):
    return t * ops.rsqrt(ops.mean(t * t, -1, keepdims=True) + 1e-5)


def unit(t):
    return t / ops.sqrt(ops.sum(ops.square(t), -1, keepdims=True) + 1e-8)


def attention_weights(t):
    powers = ops.exp(t - ops.max(t, -1, keepdims=True))
    return powers / ops.sum(powers, -1, keepdims=True)


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize(
    "normalized",
    [
        *(batch_normalized, layer_normalized, root_mean_square_normalized),
        *(unit, attention_weights),
    ],
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


INNER = {
    "weight": lambda x, w: w * 0.5,
    "row": lambda x, w: w[0] + 1.0,
    "small": lambda x, w: ops.square(x),
}
OUTER = {
    "product": lambda x, h: ops.tanh(x @ h),
    "filter": lambda x, h: ops.tanh(ops.conv(x[:, None], h[None])),
    "factor": lambda x, h: ops.tanh(x * h),
    "term": lambda x, h: ops.tanh(x + h),
    "curve": lambda x, h: ops.log(ops.square(h) + 0.1),
    "rows": lambda x, h: ops.tanh(ops.take(h, np.array([0, 2, 1]), axis=0)),
    "root": lambda x, h: x / ops.sqrt(ops.sum(h, -1, keepdims=True) + 0.1),
}


@helpers.requires_backend("tensorflow")
@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("weight", "product"),
        ("weight", "filter"),
        ("weight", "curve"),
        ("weight", "rows"),
        ("row", "factor"),
        ("row", "term"),
        ("small", "root"),
    ],
)
@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_may_differentiate_by_a_tensor_in_between(
    inner, outer, mode, name
):
    x = np.random.default_rng(1).uniform(0.3, 1.0, (3, 3)).astype("float32")

    def found(name):
        tfmix.set_global_policy(name)
        layer = OwnGradient(INNER[inner], OUTER[outer])
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
