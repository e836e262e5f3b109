"""Seven kinds of planted faults, which were not used to write `check`.

Each has several forms, in models that are built in two ways.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

ROWS = 12
WIDTH = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with one planted fault, the layer, and its loss."""

    model: Any
    x: Any
    y: Any
    loss: Any
    layer: str = "planted"


class Chain(keras.Model):
    """Calls layers one after the other, as subclassed models do."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def call(self, inputs, training=False):
        for part in self.parts:
            inputs = part(inputs, training=training)
        return inputs


def assembled(rng, shape, parts, dtype="float32"):
    """Builds a model of layers in one of two ways."""
    if rng.choice(["sequential", "subclassed"]) == "sequential":
        return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])
    model = Chain(parts)
    model(np.zeros((2, *shape), dtype))
    return model


def head(units=3):
    return [
        keras.layers.Flatten(),
        keras.layers.Dense(units),
        keras.layers.Activation("linear", dtype="float32"),
    ]


def regression(rng, shape, parts):
    x = rng.normal(size=(ROWS, *shape)).astype("float32")
    y = rng.normal(size=(ROWS, 3)).astype("float32")
    return Case(assembled(rng, shape, [*parts, *head()]), x, y, "mse")


def spread(rng, most, make, planted):
    """Returns planted layers at a random place among others."""
    depth = int(rng.integers(1, most + 1))
    place = int(rng.integers(0, depth + 1))
    before = [make() for _ in range(place)]
    return [*before, *planted, *(make() for _ in range(depth - place))]


def loud(value):
    """An initializer that makes outputs about as large as `value`."""
    return keras.initializers.RandomNormal(stddev=value / WIDTH**0.5)


class Residual(keras.layers.Layer):
    def __init__(self, gain, **settings):
        super().__init__(**settings)
        self.gain = gain
        self.inner = keras.layers.Dense(WIDTH, "relu")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return inputs + self.inner(inputs) * self.gain


def activation_overflow(rng):
    form = rng.choice(["dense", "residual"])

    def block(planted):
        settings = {"name": "planted"} if planted else {}
        if form == "residual":
            made = Residual(3e5 if planted else 0.1, **settings)
        else:
            start = loud(5e5) if planted else "glorot_uniform"
            settings["kernel_initializer"] = start
            made = keras.layers.Dense(WIDTH, "relu", **settings)
        return [made, keras.layers.LayerNormalization()]

    k = int(rng.integers(0, 12))
    parts = [part for index in range(12) for part in block(index == k)]
    return regression(rng, (WIDTH,), parts)


class Heads(keras.layers.Layer):
    """Handwritten attention without the division."""

    def __init__(self, gain, **settings):
        super().__init__(**settings)
        self.query, self.key = (
            keras.layers.Dense(WIDTH, kernel_initializer=loud(gain))
            for _ in range(2)
        )

    def build(self, shape):
        self.query.build(shape)
        self.key.build(shape)

    def call(self, inputs):
        query, key = self.query(inputs), self.key(inputs)
        scores = ops.matmul(query, ops.swapaxes(key, 1, 2))
        return ops.matmul(ops.softmax(scores), inputs)


class SelfAttention(keras.layers.Layer):
    """Keras's dot product attention, which does not scale by default."""

    def __init__(self, **settings):
        super().__init__()
        self.inner = keras.layers.Attention(**settings)

    def call(self, inputs):
        return self.inner([inputs, inputs])


def attention_without_scaling(rng):
    if rng.choice(["by hand", "keras"]) == "keras":
        planted = [
            keras.layers.Dense(WIDTH, kernel_initializer=loud(200.0)),
            SelfAttention(name="planted"),
            keras.layers.LayerNormalization(),
        ]
    else:
        # With 60, some draws choose one row so clearly that there is no error.
        gain = float(rng.choice([300.0, 1000.0]))
        planted = [Heads(gain, name="planted")]
    parts = spread(rng, 5, lambda: Residual(0.5), planted)
    return regression(rng, (5, WIDTH), parts)


class Standardised(keras.layers.Layer):
    """Normalises without an op of Keras."""

    def call(self, inputs):
        mean = ops.mean(inputs, -1, keepdims=True)
        variance = ops.var(inputs, -1, keepdims=True)
        return (inputs - mean) * ops.rsqrt(variance + 1e-3)


class Offset(keras.layers.Layer):
    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def call(self, inputs):
        return inputs + self.offset


def normalized_offset(rng):
    """Returns an offset, and a normalisation that loses digits to it."""
    layers = keras.layers.BatchNormalization, Standardised
    norm = layers[rng.integers(2)](name="planted")
    return [Offset(float(rng.choice([500.0, 2000.0]))), norm]


def variance_of_an_offset(rng):
    planted = normalized_offset(rng)
    parts = spread(rng, 5, lambda: keras.layers.Dense(WIDTH, "tanh"), planted)
    return regression(rng, (WIDTH,), parts)


def loss_over_pixels(rng):
    side = int(rng.choice([96, 128]))

    def loss(y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred))

    depth = int(rng.integers(0, 3))
    hidden = [
        keras.layers.Conv2D(4, 3, padding="same", activation="silu")
        for _ in range(depth)
    ]
    parts = [*hidden, keras.layers.Conv2D(1, 3, padding="same")]
    x = rng.normal(size=(ROWS, side, side, 1)).astype("float32")
    model = assembled(rng, (side, side, 1), parts)
    return Case(model, x, x + 5.0, loss, "loss")


class Faint(keras.layers.Layer):
    """Returns its input, with almost no gradient."""

    def call(self, inputs):
        small = inputs
        for _ in range(3):
            small = small * 5e-4
        return ops.stop_gradient(inputs - small) + small


def vanishing_gradient(rng):
    planted = [Faint(name="planted")]
    first = keras.layers.Dense(WIDTH, "tanh")
    parts = spread(rng, 6, lambda: keras.layers.Dense(WIDTH, "tanh"), planted)
    return regression(rng, (WIDTH,), [first, *parts])


class Guarded(keras.layers.Layer):
    """Divides, or takes a logarithm, with an epsilon of 1e-8."""

    def __init__(self, divides, **settings):
        super().__init__(**settings)
        self.divides = divides

    def call(self, inputs):
        if self.divides:
            return inputs / (inputs + 1e-8)
        return ops.log(inputs + 1e-8) * 0.1


def epsilon_of_1e_8(rng):
    divides = rng.choice([True, False])
    planted = [keras.layers.ReLU(), Guarded(divides, name="planted")]

    def dense():
        return keras.layers.Dense(WIDTH, "tanh", use_bias=False)

    case = regression(rng, (WIDTH,), spread(rng, 5, dense, planted))
    # This row makes the epsilon matter, which is no fault in other batches.
    # Without biases the row stays 0.
    case.x[2] = 0.0
    return case


def with_a_large_row(rng, layer, rows):
    """Spoils a row of an embedding; returns ids, this row's among them."""
    (weight,) = layer.trainable_variables
    values = np.array(weight)
    place = int(rng.integers(30))
    values[place] = 1e5 * rng.choice([-1.0, 1.0], WIDTH)
    weight.assign(values)
    ids = rng.integers(0, 30, (rows, 4)).astype("int32")
    ids[0, 0] = place
    return ids


def embedding_row_of_1e5(rng):
    layer = keras.layers.Embedding(30, WIDTH, name="planted")
    norm = keras.layers.LayerNormalization()
    hidden = [Residual(0.3) for _ in range(int(rng.integers(0, 5)))]
    model = assembled(rng, (4,), [layer, norm, *hidden, *head()], "int32")
    x = with_a_large_row(rng, layer, ROWS)
    return Case(model, x, rng.normal(size=(ROWS, 3)).astype("float32"), "mse")


KINDS = {
    builder.__name__: builder
    for builder in (
        activation_overflow,
        attention_without_scaling,
        variance_of_an_offset,
        loss_over_pixels,
        vanishing_gradient,
        epsilon_of_1e_8,
        embedding_row_of_1e5,
    )
}


def plant(kind, seed):
    """Builds one planted fault in "mixed_float16"."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy("mixed_float16")
    return KINDS[kind](np.random.default_rng(seed))


class Loud(keras.layers.Layer):
    """Returns large numbers."""

    def call(self, inputs):
        return inputs * 1e3 * 1e3


class Quiet(keras.layers.Layer):
    """Makes them small again."""

    def call(self, inputs):
        return inputs * 1e-3 * 1e-3


def loud_between_others():
    """Plants an overflow in a small model of Keras's "mixed_float16"."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    parts = [keras.layers.Dense(WIDTH, "tanh"), Loud(name="loud"), Quiet()]
    return regression(np.random.default_rng(0), (WIDTH,), parts)
