"""A layer reads and writes its own variables exactly."""

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
