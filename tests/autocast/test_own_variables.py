"""What a layer reads of its own variables, and writes to them, is exact."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfmix

ON_JAX = keras.backend.backend() == "jax"
NAMES = ("mixed_float16", "mixed_bfloat16")
# Eager, by a compiled function, and by XLA; JAX compiles by XLA alone.
WAYS = ("eager", "graph", "xla")


def results(layer, x, way, count=3):
    """Returns what `count` calls of a layer return."""
    if way == "eager":
        return [float(layer(x)[0, 0]) for _ in range(count)]
    model = keras.Sequential([layer])
    model.compile(jit_compile=way == "xla")
    return [float(model.predict(x, verbose=0)[0, 0]) for _ in range(count)]


class Counts(layers.Layer):
    """Returns what a counter holds before it counts on."""

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
