"""A 16-bit layer's weights get their gradients in float32."""

import contextlib
import itertools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers, loops, steps
from tfmix._keras import context

# The last two run code that TensorFlow traces for a GPU.
ON_TENSORFLOW = "eager", "graph", "jit", "eager-gpu", "gpu"
WAYS = ("eager", "jit") if helpers.ON_JAX else ON_TENSORFLOW
MODES_OF = {"jit": steps.MODES[-1], "eager-gpu": "eager", "gpu": "graph"}
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


IDS = RNG.integers(0, 50, (32, 20))
# Half of all tokens are the same.
IDS[:, ::2] = 3


class Own(layers.Layer):
    """A typical user's layer: Keras ops on its own weights."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 8))
        self.gain = self.add_weight(shape=(8,), initializer="ones")
        self.b = self.add_weight(shape=(8,))

    def call(self, x):
        return ops.add(ops.multiply(ops.matmul(x, self.w), self.gain), self.b)


class Dots(layers.Layer):
    """Multiplies by weights of more than two axes, from either side."""

    def build(self, shape):
        self.first = self.add_weight(shape=(3, shape[-2]))
        self.second = self.add_weight(shape=(3, shape[-1], 4))

    def call(self, x):
        return ops.dot(ops.dot(self.first, x), self.second)


class Tied(layers.Layer):
    """A table for looking up words, and for a product."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(50, 16)

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        return ops.matmul(self.table(ids), ops.transpose(self.table.embeddings))


class Repeated(layers.Layer):
    """Multiplies by one weight eight times."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1], "tanh")
        self.dense.build(shape)

    def call(self, x):
        for _ in range(8):
            x = self.dense(x)
        return x


class Terms(layers.Layer):
    """Adds and subtracts weights in every way that broadcasting allows."""

    TERMS = ops.add, ops.subtract, lambda x, weight: ops.subtract(weight, x)
    SHAPES = (3,), (2, 1), (1, 2, 3), (4, 2, 3), ()

    def build(self, _):
        self.terms = [
            (term, self.add_weight(shape=shape, initializer="uniform"))
            for term in self.TERMS
            for shape in self.SHAPES
        ]

    def call(self, x):
        return sum(term(x, weight) for term, weight in self.terms)


class Cell(layers.Layer):
    """A cell of a user: products, a bias, and weights that it multiplies by."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.state_size = 6

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 6))
        self.recurrent = self.add_weight(shape=(6, 6))
        self.bias = self.add_weight(shape=(6,))
        self.scale = self.add_weight(shape=(1, 6), initializer="ones")
        self.inner = layers.Dense(6, use_bias=False)
        self.inner.build((None, 6))

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
        self.terms = self.add_weight(shape=(8, 6))
        self.matrices = self.add_weight(shape=(8, 6, 6))

    def call(self, x, states):
        h, _ = super().call(x, states)
        h = h * self.terms + self.terms
        h = h + ops.einsum("bi,bij->bj", h, self.matrices)
        return h, [h]


def adapted():
    layer = layers.Dense(8)
    layer.build((None, 10))
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones((2, 8)))
    return [layer]


EINSUM = "abc,cde->abde", (None, 4, 6)
ROWS, TEXT, PIXELS = normal(64, 10), normal(8, 12, 5), normal(4, 16, 16, 4)
SHORT = normal(8, 5, 4)
# The last steps of some rows are masked.
SHORT[::2, -1] = 0.0
# The layers of a model, and its inputs.
MODELS = {
    "dense": (lambda: [layers.Dense(16)], ROWS),
    "einsum": (lambda: [layers.EinsumDense(*EINSUM)], normal(8, 12, 10)),
    "conv": (lambda: [layers.Conv2D(8, 3, padding="same")], PIXELS),
    "grouped": (lambda: [layers.Conv2D(8, 3, groups=2)], PIXELS),
    "causal": (lambda: [layers.Conv1D(8, 3, padding="causal")], TEXT),
    "depthwise": (lambda: [layers.DepthwiseConv2D(3)], PIXELS),
    "separable": (lambda: [layers.SeparableConv2D(6, 3)], PIXELS),
    "transposed": (lambda: [layers.Conv2DTranspose(6, 3, strides=2)], PIXELS),
    "lstm": (lambda: [layers.LSTM(8)], TEXT),
    "gru": (lambda: [layers.GRU(8, reset_after=False)], TEXT),
    "both_ways": (lambda: [layers.Bidirectional(layers.GRU(8))], TEXT),
    "conv_lstm": (lambda: [layers.ConvLSTM2D(4, 3)], normal(2, 3, 6, 6, 2)),
    "masked": (lambda: [layers.Masking(), layers.LSTM(6)], SHORT),
    "nested_loops": (
        lambda: [layers.TimeDistributed(layers.LSTM(6)), layers.GRU(6)],
        normal(8, 3, 5, 4),
    ),
    "own_cell": (lambda: [layers.RNN(Cell())], SHORT),
    "per_row": (lambda: [layers.RNN(PerRow())], SHORT),
    "embedding": (lambda: [layers.Embedding(50, 16)], IDS),
    "tied": (lambda: [Tied()], IDS),
    "batch_norm": (
        lambda: [layers.BatchNormalization(), layers.Dense(4)],
        ROWS,
    ),
    "layer_norm": (
        lambda: [layers.LayerNormalization(), layers.RMSNormalization()],
        ROWS,
    ),
    "own": (lambda: [Own()], ROWS),
    "dots": (lambda: [Dots()], TEXT),
    "terms": (lambda: [layers.Dense(3), Terms()], normal(1, 2, 3)),
    "adapted": (adapted, ROWS),
    "shared": (lambda: [Repeated()], normal(64, 16)),
}
if not helpers.ON_JAX:
    MODELS["changing"] = (lambda: [layers.RNN(Changing())], SHORT)
# A CPU's kernels for the gradient of a depthwise filter, and for an einsum, sum
# in 16 bit. A GPU's, for which they stand here, do not.
SUMMED_BY_A_CPU = 0.1
QUICK = {("dense", WAYS[-1]), ("dots", "eager"), ("terms", "eager")}
QUICK |= {("own_cell", "gpu")}


def gradients(policy, name, way, weights=None):
    tfmix.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    make, x = MODELS[name]
    model = keras.Sequential(make())
    model(x)
    if weights is not None:
        model.set_weights(weights)
    before = model.get_weights()

    def loss():
        outputs = ops.cast(model(x, training=True), "float32")
        return ops.mean(ops.square(outputs - 0.3))

    with traced(way):
        mode = MODES_OF.get(way, way)
        found = loops.gradients(loss, model.trainable_variables, mode)
    return [np.asarray(g) for g in found], before


def traced(way):
    for_gpu = context.compiled_for("cuda")
    return for_gpu if "gpu" in way else contextlib.nullcontext()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("name", "way"), helpers.quick_are(QUICK, itertools.product(MODELS, WAYS))
)
def test_gradients_are_those_of_float32(name, way, policy):
    right, weights = gradients("float32", name, way)
    found, _ = gradients(policy, name, way, weights)
    # Each factor is rounded once, and some are rounded more often.
    within = 0.004 if policy == "mixed_float16" else 0.03
    if name in ("separable", "tied") and "gpu" in way:
        within = max(within, SUMMED_BY_A_CPU)
    largest = max(np.linalg.norm(g) for g in right)
    for a, b in zip(right, found, strict=True):
        assert b.dtype == "float32"
        error = np.linalg.norm(a - b)
        # Gradients that a normalization cancels are rounding noise.
        assert error < within * max(np.linalg.norm(a), 1e-3 * largest)


def of_kernel(x, upstream, dtype):
    """Returns the gradient of a `Dense` kernel, and the kernel's dtype."""
    tfmix.set_global_policy(dtype)
    layer = layers.Dense(upstream.shape[1], use_bias=False)
    layer.build(x.shape)

    def loss():
        return ops.sum(ops.cast(layer(x), "float32") * upstream)

    (found,) = loops.gradients(loss, [layer._kernel], steps.MODES[-1])
    return np.asarray(found)


@pytest.mark.parametrize(
    ("rows", "value", "expected"),
    # The second has more digits than float16.
    [(1024, 100.0, 102_400), (4097, 1.0, 4097)],
)
def test_a_sum_has_the_range_and_the_digits_of_float32(rows, value, expected):
    x, upstream = np.full((rows, 4), value), np.ones((rows, 2))
    found = of_kernel(np.float32(x), np.float32(upstream), "mixed_float16")
    np.testing.assert_array_equal(found, expected)


class Alone(layers.Layer):
    """Computes with its weight before it multiplies by it."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 4))

    def call(self, x):
        padded = ops.pad(ops.tril(self.w), [[0, 0], [1, 1]])
        parts = [self.w * 2, ops.abs(self.w), ops.roll(padded, 1, axis=-1)]
        return ops.matmul(x, ops.concatenate(parts, axis=-1))


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: [layers.SeparableConv2D(8, 3)], 100 + normal(4, 32, 32, 4)),
        (lambda: [layers.SeparableConv1D(8, 3)], 100 + normal(4, 1024, 4)),
        (lambda: [layers.PReLU(shared_axes=[1])], -100 + normal(4, 1024, 4)),
        (lambda: [Alone()], 100 + normal(4096, 8)),
    ],
)
@pytest.mark.parametrize("way", ["jit", WAYS[-1]])
def test_a_sum_beyond_float16_is_that_of_float32(way, make, x, monkeypatch):
    monkeypatch.setitem(MODELS, "large", (make, x))
    right, weights = gradients("float32", "large", way)
    found, _ = gradients("mixed_float16", "large", way, weights)
    within = SUMMED_BY_A_CPU if "gpu" in way else 0.01
    for a, b in zip(right, found, strict=True):
        assert np.linalg.norm(a - b) < within * np.linalg.norm(a)
