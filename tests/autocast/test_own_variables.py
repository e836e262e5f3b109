"""A layer reads and writes its own variables exactly."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix
from tests import helpers, steps

NAMES = ("mixed_float16", "mixed_bfloat16")
# A mean over many inputs that were rounded to 16 bit differs by this.
ROUNDED_INPUTS = {"rtol": 1e-3}


def results(layer, x, mode, count=3):
    """Returns the results of `count` calls of a layer."""
    if mode == "eager":
        return [float(layer(x)[0, 0]) for _ in range(count)]
    model = keras.Sequential([layer])
    model.compile(**steps.settings(mode))
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


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize(
    ("dtype", "counter"), [("float32", "float32"), (None, "int32")]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_variable_that_was_cast_keeps_its_value_of_then(
    name, dtype, counter, mode
):
    tfmix.set_global_policy(name)
    layer = Counts(counter, dtype=dtype)
    assert results(layer, np.ones((1, 1), "float32"), mode) == [0.0, 1.0, 2.0]


class Inverts(layers.Layer):
    def __init__(self, mixes=False, **kwargs):
        super().__init__(**kwargs)
        self.mixes = mixes

    def build(self, shape):
        self.p = self.add_weight(shape=(2, 2), initializer="identity")

    def call(self, x):
        if self.mixes and helpers.dtype_of(x) != "float32":
            raise TypeError("not in 16 bit")
        return ops.matmul(x, ops.inv(ops.cast(self.p, x.dtype)))


@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize(
    "layer", [{"dtype": "float32"}, {"mixes": True}, {}], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_linear_algebra_takes_a_variable_that_was_cast(name, layer, mode):
    tfmix.set_global_policy(name)
    x = np.array([[3.0, 4.0]], "float32")
    assert results(Inverts(**layer), x, mode, 1) == [3.0]


def by_functions_of_the_backend(v, b, momentum):
    """Moves a variable by functions that tfmix does not see."""
    if helpers.ON_JAX:
        import jax

        rest = jax.lax.mul(b, b.dtype.type(1 - momentum))
        v.assign(jax.lax.add(v.value * momentum, rest))
        return
    import tensorflow as tf

    rest = tf.multiply(b, tf.cast(1 - momentum, b.dtype))
    v.assign(tf.add(tf.multiply(v.value, momentum), rest))


# Each moves a variable `v` towards `b` in one of the common ways.
SPELLINGS = {
    "sum of two": lambda v, b, m: v.assign(m * v + (1 - m) * b),
    "difference": lambda v, b, m: v.assign(v + (1 - m) * (b - v)),
    "add": lambda v, b, m: v.assign_add((1 - m) * (b - v)),
    "stopped": lambda v, b, m: v.assign(
        ops.stop_gradient(v.value * m + b * (1 - m))
    ),
    "backend": by_functions_of_the_backend,
    "cast": lambda v, b, m: v.assign(v * m + ops.cast(b, "float32") * (1 - m)),
}


class Averages(layers.Layer):
    """A user's batch normalization, without a variance."""

    def __init__(self, spelling):
        super().__init__()
        self.move = SPELLINGS[spelling]

    def build(self, shape):
        self.mean, self.total = self.statistics = [
            self.add_weight(shape=of, initializer="zeros", trainable=False)
            for of in (shape[-1:], ())
        ]

    def call(self, x, training=None):
        if training:
            b = ops.mean(x, 0)
            self.move(self.mean, b, 0.98)
            self.total.assign_add(ops.sum(x))
            return x - b
        return x - self.mean


def statistics_after(policy, make, x, mode):
    """Returns what a layer has assigned after training in 40 steps."""
    tfmix.set_global_policy(policy)
    layer = make()
    model = keras.Sequential([layer, layers.Dense(1)])
    # Nothing learns, so all that differs is what the layer assigns.
    sgd = keras.optimizers.SGD(0.0)
    model.compile(sgd, "mse", **steps.settings(mode))
    y = np.zeros((len(x), 1), "float32")
    model.fit(x, y, batch_size=len(x) // 40, shuffle=False, verbose=0)
    return [np.array(v) for v in layer.statistics]


def assert_statistics_are_those_of_float32(policy, make, x, mode):
    right = statistics_after("float32", make, x, mode)
    found = statistics_after(policy, make, x, mode)
    for actual, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(actual, expected, **ROUNDED_INPUTS)


@pytest.mark.costly
@pytest.mark.parametrize("mode", steps.MODES)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", NAMES)
def test_running_statistics_are_those_of_float32(name, spelling, mode):
    rng = np.random.default_rng(0)
    x = rng.normal([5.0, 5.1, 4.9], 0.2, (1000, 3)).astype("float32")
    assert_statistics_are_those_of_float32(
        name, lambda: Averages(spelling), x, mode
    )
