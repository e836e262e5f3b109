"""A layer reads and writes its own variables exactly."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix

ON_JAX = keras.backend.backend() == "jax"
NAMES = ("mixed_float16", "mixed_bfloat16")
# They are eager, a compiled function, and XLA; JAX compiles only with XLA.
WAYS = ("xla", "eager") if ON_JAX else ("eager", "graph", "xla")
# A mean over many inputs that were rounded to 16 bit differs by this.
ROUNDED_INPUTS = {"rtol": 1e-3}


def results(layer, x, way, count=3):
    """Returns the results of `count` calls of a layer."""
    if way == "eager":
        return [float(layer(x)[0, 0]) for _ in range(count)]
    model = keras.Sequential([layer])
    model.compile(jit_compile=way == "xla")
    return [float(model.predict(x, verbose=0)[0, 0]) for _ in range(count)]


class Counts(layers.Layer):
    """Returns the value of a counter, then increases it."""

    def __init__(self, counter, **kwargs):
        super().__init__(**kwargs)
        self.v = self.add_weight(
            shape=(), dtype=counter, initializer="zeros", trainable=False
        )

    def call(self, x):
        old = ops.cast(self.v, self.v.dtype)
        self.v.assign(old + 1)
        return x * ops.cast(old, x.dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "counter"), [("float32", "float32"), (None, "int32")]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_variable_that_was_cast_is_what_it_was_then(
    name, dtype, counter, way
):
    tfmix.set_global_policy(name)
    layer = Counts(counter, dtype=dtype)
    assert results(layer, np.ones((1, 1), "float32"), way) == [0.0, 1.0, 2.0]


class Inverts(layers.Layer):
    def __init__(self, mixes=False, **kwargs):
        super().__init__(**kwargs)
        self.mixes = mixes

    def build(self, shape):
        self.p = self.add_weight(shape=(2, 2), initializer="identity")

    def call(self, x):
        if self.mixes and keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("not in 16 bit")
        return ops.matmul(x, ops.inv(ops.cast(self.p, x.dtype)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "layer", [{"dtype": "float32"}, {"mixes": True}, {}], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_linear_algebra_takes_a_variable_that_was_cast(name, layer, way):
    tfmix.set_global_policy(name)
    x = np.array([[3.0, 4.0]], "float32")
    assert results(Inverts(**layer), x, way, 1) == [3.0]


def mean_by(spelling, v, b, momentum):
    """Moves a variable `v` towards `b` in one of the common ways."""
    if spelling == "sum of two":
        v.assign(momentum * v + (1 - momentum) * b)
    elif spelling == "ops":
        old = ops.multiply(v, momentum)
        v.assign(ops.add(old, ops.multiply(b, 1 - momentum)))
    elif spelling == "difference":
        v.assign(v + (1 - momentum) * (b - v))
    elif spelling == "add":
        v.assign_add((1 - momentum) * (b - v))
    elif spelling == "sub":
        v.assign_sub((v - b) * (1 - momentum))
    elif spelling == "stopped":
        new = v.value * momentum + b * (1 - momentum)
        v.assign(ops.stop_gradient(new))
    elif spelling == "backend":
        v.assign(of_backend(v.value, b, momentum))
    elif spelling == "cast":
        b = ops.cast(b, "float32")
        v.assign(v * momentum + b * (1 - momentum))


def of_backend(v, b, momentum):
    """Does the same with the backend's own functions, unseen by tfmix."""
    if ON_JAX:
        import jax

        return jax.lax.add(
            v * momentum, jax.lax.mul(b, b.dtype.type(1 - momentum))
        )
    import tensorflow as tf

    return tf.add(
        tf.multiply(v, tf.cast(momentum, v.dtype)),
        tf.multiply(b, tf.cast(1 - momentum, b.dtype)),
    )


SPELLINGS = (
    *("sum of two", "ops", "difference", "add", "sub"),
    *("stopped", "backend", "cast"),
)


class Averages(layers.Layer):
    """A user's batch normalization, without a variance."""

    def __init__(self, spelling, momentum, **kwargs):
        super().__init__(**kwargs)
        self.spelling, self.momentum = spelling, momentum

    def build(self, shape):
        self.mean = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False
        )
        self.total = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    def call(self, x, training=None):
        if training:
            b = ops.mean(x, 0)
            mean_by(self.spelling, self.mean, b, self.momentum)
            self.total.assign_add(ops.sum(x))
            return x - b
        return x - self.mean


def averages_after(spelling, momentum, way, steps=20, batch=25):
    """Returns a layer's statistics after training on steady data."""
    rng = np.random.default_rng(0)
    x = rng.normal([5.0, 5.1, 4.9], 0.2, (steps * batch, 3)).astype("float32")
    y = np.zeros((len(x), 1), "float32")
    layer = Averages(spelling, momentum)
    model = keras.Sequential([layer, layers.Dense(1)])
    model.compile(
        "sgd", "mse", run_eagerly=way == "eager", jit_compile=way == "xla"
    )
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    return [np.array(v) for v in (layer.mean, layer.total)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_running_statistics_are_those_of_float32(name, spelling, way):
    tfmix.set_global_policy("float32")
    right = averages_after(spelling, 0.98, way)
    tfmix.set_global_policy(name)
    found = averages_after(spelling, 0.98, way)
    for actual, expected in zip(found, right, strict=True):
        # The inputs of a layer are rounded to 16 bit, with random errors.
        np.testing.assert_allclose(actual, expected, **ROUNDED_INPUTS)


class Codebook(layers.Layer):
    """Quantizes vectors; each code follows the mean of those nearest to it."""

    def build(self, shape):
        width = shape[-1]
        add = functools.partial(self.add_weight, trainable=False)
        self.counts = add(shape=(4,), initializer="ones")
        self.totals = add(shape=(4, width), initializer=self.first)
        self.codes = add(shape=(4, width), initializer=self.first)
        self.statistics = [self.counts, self.totals, self.codes]

    def first(self, shape, dtype):
        corners = [[0.0, 0.0, 1.0], [0.0, 2.0, 0.0], [3.0, 0.0, 0.0], [4.0] * 3]
        return ops.cast(corners, dtype)

    def call(self, x, training=None):
        gaps = ops.expand_dims(x, 1) - self.codes
        nearest = ops.argmin(ops.sum(ops.square(gaps), -1), -1)
        if training:
            chosen = ops.one_hot(nearest, 4, dtype=x.dtype)
            totals = ops.matmul(ops.transpose(chosen), x)
            self.counts.assign(0.98 * self.counts + 0.02 * ops.sum(chosen, 0))
            self.totals.assign(0.98 * self.totals + 0.02 * totals)
            sizes = ops.expand_dims(self.counts, 1)
            self.codes.assign(self.totals / (sizes + 1e-5))
        return ops.take(self.codes, nearest, axis=0)


class MomentumEncoder(layers.Layer):
    """A second encoder follows the one that is trained."""

    def build(self, shape):
        third = keras.initializers.Constant(1 / 3)
        self.encoder = layers.Dense(3, kernel_initializer=third)
        self.slow = layers.Dense(3, kernel_initializer="zeros", trainable=False)
        self.encoder.build(shape)
        self.slow.build(shape)
        self.statistics = self.slow.weights

    def call(self, x, training=None):
        if training:
            pairs = zip(self.slow.weights, self.encoder.weights, strict=True)
            for slow, fast in pairs:
                slow.assign(0.999 * slow + (1 - 0.999) * fast)
        return self.encoder(x) - self.slow(x)


class Centres(layers.Layer):
    """Moves the centre of each vector's class, as a centre loss does."""

    def build(self, shape):
        self.centres = self.add_weight(
            shape=(4, shape[-1]), initializer="zeros", trainable=False
        )
        self.statistics = [self.centres]

    def call(self, x, training=None):
        classes = ops.arange(4)
        gaps = x[:4] - ops.take(self.centres, classes, axis=0)
        if training:
            moved = ops.take(self.centres, classes, axis=0) + 0.01 * gaps
            self.centres.assign(
                ops.scatter_update(self.centres, classes[:, None], moved)
            )
        return x - ops.take(self.centres, classes[:1], axis=0)


def statistics_after(make, way, steps=40, batch=8):
    """Returns what a layer has assigned after training on clustered data."""
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0, 1], [0, 2, 0], [3, 0, 0], [4, 4, 4]])
    x = centres[np.arange(steps * batch) % 4] + rng.normal(
        0.3, 0.05, (steps * batch, 3)
    )
    # Casts do not change these inputs.
    x = np.array(ops.cast(ops.cast(x, "bfloat16"), "float32"))
    y = np.zeros((len(x), 1), "float32")
    layer = make()
    model = keras.Sequential([layer, layers.Dense(1)])
    # Nothing learns, so all that differs is what the layer assigns.
    sgd = keras.optimizers.SGD(0.0)
    model.compile(
        sgd, "mse", run_eagerly=way == "eager", jit_compile=way == "xla"
    )
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    return [np.array(v) for v in layer.statistics]


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [Codebook, MomentumEncoder, Centres])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_assigned_to_float32_is_computed_in_float32(
    name, make, way
):
    tfmix.set_global_policy("float32")
    right = statistics_after(make, way)
    tfmix.set_global_policy(name)
    found = statistics_after(make, way)
    for actual, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(actual, expected, **ROUNDED_INPUTS)
