"""A 16-bit layer's weights get their gradients in float32."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers
from tfmix._keras import compilation
from tfmix.gradient_scaling import weight_gradients

ON_JAX = keras.backend.backend() == "jax"
# The last two run code that TensorFlow traces for a GPU.
ON_TENSORFLOW = "eager", "graph", "jit", "eager-gpu", "gpu"
WAYS = ("eager", "jit") if ON_JAX else ON_TENSORFLOW
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


class Tied(layers.Layer):
    """A table for looking up words, and for a product."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(50, 16)

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        return ops.matmul(self.table(ids), ops.transpose(self.table.embeddings))


def stack(*some):
    return lambda: keras.Sequential([make() for make in some])


def adapted():
    model = keras.Sequential([keras.Input((10,)), layers.Dense(8)])
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(np.ones((2, 8)))
    return model


def shared():
    layer = layers.Dense(16, "tanh")
    x = inputs = keras.Input((16,))
    for _ in range(8):
        x = layer(x)
    return keras.Model(inputs, x)


MODELS = {
    "dense": (stack(lambda: layers.Dense(16)), normal(64, 10)),
    "einsum": (
        stack(lambda: layers.EinsumDense("abc,cde->abde", (None, 4, 6))),
        normal(8, 12, 10),
    ),
    "conv": (
        stack(
            lambda: layers.Conv2D(8, 3, padding="same"),
            lambda: layers.Conv2D(4, 1, strides=2),
        ),
        normal(4, 16, 16, 3),
    ),
    "grouped": (
        stack(lambda: layers.Conv2D(8, 3, groups=2)),
        normal(4, 16, 16, 4),
    ),
    "causal": (
        stack(lambda: layers.Conv1D(8, 3, padding="causal")),
        normal(4, 16, 4),
    ),
    "depthwise": (
        stack(lambda: layers.DepthwiseConv2D(3)),
        normal(4, 16, 16, 4),
    ),
    "separable": (
        stack(lambda: layers.SeparableConv2D(6, 3)),
        normal(4, 16, 16, 4),
    ),
    "transposed": (
        stack(lambda: layers.Conv2DTranspose(6, 3, strides=2)),
        normal(4, 8, 8, 4),
    ),
    "lstm": (stack(lambda: layers.LSTM(8)), normal(8, 12, 5)),
    "gru": (stack(lambda: layers.GRU(8, reset_after=False)), normal(8, 12, 5)),
    "embedding": (stack(lambda: layers.Embedding(50, 16)), IDS),
    "tied": (stack(Tied), IDS),
    "batch_norm": (
        stack(layers.BatchNormalization, lambda: layers.Dense(4)),
        normal(64, 10),
    ),
    "layer_norm": (
        stack(layers.LayerNormalization, layers.RMSNormalization),
        normal(64, 10),
    ),
    "own": (stack(Own), normal(64, 10)),
    "adapted": (adapted, normal(64, 10)),
    "shared": (shared, normal(64, 16)),
}
QUICK = {(name, way) for name in MODELS for way in ("jit", WAYS[-1])} | {
    (name, way) for name in ("dense", "conv", "tied") for way in WAYS
}


def gradients(policy, name, way, weights=None):
    tfmix.set_global_policy(policy)
    keras.utils.set_random_seed(0)
    make, x = MODELS[name]
    model = make()
    model(x[:2])
    if weights is not None:
        model.set_weights(weights)

    def loss(outputs):
        outputs = ops.cast(outputs, "float32")
        return ops.mean(ops.square(outputs - 0.3))

    if ON_JAX:
        import jax

        state = [v.value for v in model.non_trainable_variables]

        def of_weights(weights):
            outputs, _ = model.stateless_call(weights, state, x, training=True)
            return loss(outputs)

        gradient = jax.grad(of_weights)
        gradient = jax.jit(gradient) if way == "jit" else gradient
        found = gradient([v.value for v in model.trainable_variables])
    else:
        import tensorflow as tf

        def step(x):
            with tf.GradientTape() as tape:
                value = loss(model(x, training=True))
            found = tape.gradient(value, model.trainable_variables)
            return [tf.convert_to_tensor(g) for g in found]

        if "eager" not in way:
            step = tf.function(step, jit_compile=way == "jit")
        with traced(way):
            found = step(tf.constant(x))
    return [np.asarray(g) for g in found], model.get_weights()


def traced(way):
    for_gpu = compilation.compiled_for("cuda")
    return for_gpu if "gpu" in way else contextlib.nullcontext()


def cases():
    for name in MODELS:
        for way in WAYS:
            marks = [] if (name, way) in QUICK else [pytest.mark.slow]
            yield pytest.param(name, way, marks=marks)


@pytest.mark.costly
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(("name", "way"), list(cases()))
def test_gradients_are_those_of_float32(name, way, policy):
    right, weights = gradients("float32", name, way)
    found, _ = gradients(policy, name, way, weights)
    # Each factor is rounded once, and some are rounded more often.
    within = 0.004 if policy == "mixed_float16" else 0.03
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
    if ON_JAX:
        import jax

        def loss(kernel):
            with keras.StatelessScope([(layer._kernel, kernel)]):
                outputs = layer(x)
            return ops.sum(ops.cast(outputs, "float32") * upstream)

        return np.asarray(jax.jit(jax.grad(loss))(layer._kernel.value))
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def gradient(x):
        with tf.GradientTape() as tape:
            outputs = layer(x)
            loss = ops.sum(ops.cast(outputs, "float32") * upstream)
        return tape.gradient(loss, layer._kernel.value)

    return gradient(tf.constant(x)).numpy()


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
        (lambda: layers.SeparableConv2D(8, 3), 100 + normal(4, 32, 32, 4)),
        (lambda: layers.SeparableConv1D(8, 3), 100 + normal(4, 1024, 4)),
        (lambda: layers.PReLU(shared_axes=[1]), -100 + normal(4, 1024, 4)),
        (Alone, 100 + normal(4096, 8)),
    ],
)
@pytest.mark.parametrize("way", ["jit", WAYS[-1]])
def test_a_sum_beyond_float16_is_that_of_float32(way, make, x, monkeypatch):
    monkeypatch.setitem(MODELS, "large", (stack(make), x))
    right, weights = gradients("float32", "large", way)
    found, _ = gradients("mixed_float16", "large", way, weights)
    for a, b in zip(right, found, strict=True):
        assert np.linalg.norm(a - b) < 0.01 * np.linalg.norm(a)


def test_a_copy_knows_its_weight_only_in_a_layer():
    tfmix.set_global_policy("mixed_float16")
    seen = []

    class Looks(layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=(2, 2))

        def call(self, x):
            copy = self.w.value
            seen.append((copy.dtype, weight_gradients.source(copy)))
            return x

    layer = Looks()
    layer(np.ones((1, 2)))
    ((dtype, weight),) = seen
    assert keras.backend.standardize_dtype(dtype) == "float16"
    np.testing.assert_array_equal(weight, layer.w)
    assert weight_gradients.source(layer.w.value) is None


def test_the_function_chosen_for_a_weight_multiplies_by_it():
    tfmix.set_global_policy("mixed_float16")
    asked = []

    def multiply(inputs, weight, axes):
        asked.append((weight.dtype, axes.inputs, axes.weight, axes.outputs))
        return None if axes.batch else ops.einsum("ab,bc->ac", inputs, inputs)

    class Products(layers.Layer):
        def build(self, _):
            self.w = self.add_weight(shape=(3, 3))

        def call(self, x):
            return [
                ops.matmul(x, self.w),
                ops.einsum("ij,jk->ik", x, self.w),
                ops.tensordot(x, self.w, 1),
            ]

    layer = Products()
    x = ops.cast(RNG.integers(-3, 4, (3, 3)), "float16")
    before = layer(x)
    weight_gradients.choose(layer.w, multiply)
    for found in layer(x):
        np.testing.assert_array_equal(found, ops.matmul(x, x))
    assert [x[1:] for x in asked][1] == ("ij", "jk", "ik")
    dtypes = {keras.backend.standardize_dtype(x[0]) for x in asked}
    assert dtypes == {"float32"}
    weight_gradients.choose(layer.w, None)
    for one, other in zip(layer(x), before, strict=True):
        helpers.assert_same_bits(one, other)


@helpers.requires_backend("jax")
def test_products_have_every_derivative():
    import jax
    from jax import numpy as jnp

    from tfmix.gradient_scaling import contraction, jax_products

    axes = contraction.of_einsum("abc,dcb->ad", (3, 3), 1)
    x = jnp.asarray(normal(2, 3, 4), "float16")
    w = jnp.asarray(normal(5, 4, 3))

    def exact(x, w):
        return jnp.einsum("abc,dcb->ad", x, w)

    def product(x, w):
        return jax_products.contracted(exact, x, w, axes)

    def loss(function):
        return lambda x, w: jnp.sum(jnp.sin(function(x, w).astype("float32")))

    def close(found, right):
        error = np.linalg.norm(np.ravel(found - right))
        assert error < 0.004 * np.linalg.norm(np.ravel(right))

    wide = x.astype("float32")
    mine, right = loss(product), loss(exact)
    gradient, expected = (jax.jit(jax.grad(one, 1)) for one in (mine, right))
    close(gradient(x, w), expected(wide, w))
    hessians = (jax.jit(jax.hessian(one, 1)) for one in (mine, right))
    close(*(one(of, w) for one, of in zip(hessians, (x, wide), strict=True)))
    mixed = (jax.jit(jax.jacrev(jax.grad(one), 1)) for one in (mine, right))
    close(*(one(of, w) for one, of in zip(mixed, (x, wide), strict=True)))
    _, push = jax.linearize(lambda w: mine(x, w), w)
    close(push(w), jax.jvp(lambda w: right(wide, w), (w,), (w,))[1])
    xs, ws = jnp.stack([x, 2 * x]), jnp.stack([w, 3 * w], axis=2)
    for places in ((0, 2), (None, 2), (0, None)):
        given = [
            one if place is None else many
            for place, one, many in zip(places, (x, w), (xs, ws), strict=True)
        ]
        close(
            jax.vmap(gradient, places)(*given),
            jax.vmap(expected, places)(given[0].astype("float32"), given[1]),
        )
    rematerialised = jax.checkpoint(mine)
    close(jax.jit(jax.grad(rematerialised, 1))(x, w), expected(wide, w))
