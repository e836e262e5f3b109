"""Recurrent layers in TensorFlow's loops have the gradients of float32."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers
from tfmix._keras import tracing

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf
else:
    pytestmark = helpers.requires_backend("tensorflow")

POLICIES = "mixed_float16", "mixed_bfloat16"
ROWS, STEPS, UNITS = 8, 5, 6


class Cell(keras.Layer):
    """A cell of a user: products, a bias, and weights that it multiplies by."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.state_size = UNITS

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], UNITS))
        self.recurrent = self.add_weight(shape=(UNITS, UNITS))
        self.bias = self.add_weight(shape=(UNITS,))
        self.scale = self.add_weight(shape=(1, UNITS), initializer="ones")
        self.inner = layers.Dense(UNITS, use_bias=False)
        self.inner.build((None, UNITS))

    def call(self, x, states):
        h = ops.matmul(x, self.kernel) + ops.matmul(states[0], self.recurrent)
        h = ops.tanh(h + self.bias) * self.scale
        h = h + 0.1 * self.inner(h)
        return h, [h]


class Changing(Cell):
    """Its weights are others in each step."""

    def call(self, x, states):
        self.kernel.assign(self.kernel * 0.9)
        return super().call(x, states)


class PerRow(Cell):
    """Has weights for each row of a batch."""

    def build(self, shape):
        super().build(shape)
        self.terms = self.add_weight(shape=(ROWS, UNITS))
        self.matrices = self.add_weight(shape=(ROWS, UNITS, UNITS))

    def call(self, x, states):
        h, _ = super().call(x, states)
        h = h * self.terms + self.terms
        h = h + ops.einsum("bi,bij->bj", h, self.matrices)
        return h, [h]


class Selecting(Cell):
    """Multiplies another number of rows in each step."""

    def call(self, x, states):
        h, _ = super().call(x, states)
        some = tf.boolean_mask(h, x[:, 0] > 0)
        some = ops.matmul(some, self.recurrent) + self.bias
        h = ops.tanh(h + 0.1 * ops.sum(some, axis=0, keepdims=True))
        return h, [h]


SEQUENCE = (STEPS, 4)
MODELS = {
    "masked": (
        [layers.Masking, lambda: layers.LSTM(UNITS)],
        SEQUENCE,
    ),
    "any length": ([lambda: layers.LSTM(UNITS)], (None, 4)),
    "own": ([lambda: layers.RNN(Cell())], SEQUENCE),
    "changing": ([lambda: layers.RNN(Changing())], SEQUENCE),
    "selecting": ([lambda: layers.RNN(Selecting())], SEQUENCE),
    "per row": ([lambda: layers.RNN(PerRow())], SEQUENCE),
    "in a loop": (
        [
            lambda: layers.TimeDistributed(layers.LSTM(UNITS)),
            lambda: layers.GRU(UNITS),
        ],
        (3, *SEQUENCE),
    ),
}


def gradients(name, policy, for_gpu):
    """Returns a model's gradients in a graph."""
    tfmix.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    make, shape = MODELS[name]
    shape = (None if name == "any length" else ROWS, *shape)
    model = keras.Sequential([keras.Input(batch_shape=shape)])
    for layer in make:
        model.add(layer())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, *[n or STEPS for n in shape[1:]]))
    x[:, -1] *= rng.integers(0, 2, (ROWS, *[1] * (x.ndim - 2)))

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def traced(x):
        with tf.GradientTape() as tape:
            out = ops.cast(model(x, training=True), "float32")
            loss = ops.mean(ops.square(out - 0.3))
        return tape.gradient(loss, model.trainable_variables)

    platform = tracing.compiled_for("cuda" if for_gpu else "")
    with platform:
        return [np.asarray(g) for g in traced(tf.constant(x, "float32"))]


def is_close(found, exact, limit):
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == "float32"
        error = np.abs(one - other).max() / np.abs(other).max()
        assert error < limit


QUICK = {("masked", True), ("own", True)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("name", "for_gpu"),
    helpers.quick_are(QUICK, itertools.product(MODELS, [True, False])),
)
def test_the_gradients_of_a_loops_weights_are_those_of_float32(
    name, policy, for_gpu
):
    exact = gradients(name, "float32", for_gpu=False)
    found = gradients(name, policy, for_gpu)
    is_close(found, exact, 0.01 if policy == POLICIES[0] else 0.06)
