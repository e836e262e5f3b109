"""Eight kinds of planted faults, each at a random depth and place.

Every builder returns the model in "mixed_float16", a batch, a loss and the
name of the layer that holds the fault. All of them train in float32.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

from tfmix._keras import compile_method

ROWS = 16
WIDTH = 12


@dataclasses.dataclass(frozen=True)
class Planted:
    model: Any
    x: Any
    y: Any
    loss: Any
    layer: str
    phase: str = "forward"


class Loud(keras.layers.Layer):
    """Returns large numbers, which the layer after it makes small again."""

    def call(self, inputs):
        return inputs * 1e3 * 1e3


class Quiet(keras.layers.Layer):
    def call(self, inputs):
        return inputs * 1e-3 * 1e-3


@ops.custom_gradient
def exploding(values):
    def grad(upstream):
        return upstream * 1e4 * 1e4

    return values * 0.0, grad


class UnscaledAttention(keras.layers.Layer):
    """Dot-product attention that forgot to divide by the root of the width."""

    def __init__(self, gain, **settings):
        super().__init__(**settings)
        self.gain = gain
        self.query = keras.layers.Dense(WIDTH)
        self.key = keras.layers.Dense(WIDTH)

    def build(self, input_shape):
        self.query.build(input_shape)
        self.key.build(input_shape)

    def call(self, inputs):
        query = self.query(inputs) * self.gain
        key = self.key(inputs) * self.gain
        scores = ops.matmul(query, ops.transpose(key, (0, 2, 1)))
        # Op rules would run `softmax` in float32, so it is written out.
        raised = ops.subtract(scores, ops.max(scores, -1, keepdims=True))
        weights = ops.exp(raised)
        weights = weights / ops.sum(weights, -1, keepdims=True)
        return ops.matmul(weights, inputs)


class Offset(keras.layers.Layer):
    def call(self, inputs):
        return inputs + 300.0


class NaiveVariance(keras.layers.Layer):
    """Normalises by `E[x**2] - E[x]**2`."""

    def call(self, inputs):
        mean = ops.mean(inputs, -1, keepdims=True)
        square = ops.mean(inputs * inputs, -1, keepdims=True)
        deviation = ops.sqrt(square - mean * mean + 1e-3)
        return (inputs - mean) / deviation


class TinyEpsilon(keras.layers.Layer):
    """Divides rows by their size, which is 0/0 for a row without features."""

    def __init__(self, epsilon=1e-8, **settings):
        super().__init__(**settings)
        self.epsilon = epsilon

    def call(self, inputs):
        size = ops.max(ops.abs(inputs), -1, keepdims=True)
        return inputs * (size / (size + self.epsilon))


class FaintGradient(keras.layers.Layer):
    """Makes gradients a hundred million times too small."""

    def call(self, inputs):
        small = inputs * 1e-5
        return small * 1e-6 + ops.stop_gradient(inputs)


def stack(layers, depth, place, rng):
    """Puts some layers between dense blocks."""
    before = [keras.layers.Dense(WIDTH, "tanh") for _ in range(place)]
    after = [keras.layers.Dense(WIDTH, "tanh") for _ in range(depth - place)]
    head = [
        keras.layers.Dense(3),
        keras.layers.Activation("linear", dtype="float32"),
    ]
    model = keras.Sequential(
        [keras.Input((WIDTH,)), *before, *layers, *after, *head]
    )
    x = rng.normal(size=(ROWS, WIDTH)).astype("float32")
    y = rng.normal(size=(ROWS, 3)).astype("float32")
    return model, x, y


def activation_overflow(rng):
    place = int(rng.integers(0, 12))
    model, x, y = stack([Loud(name="loud"), Quiet()], 12, place, rng)
    return Planted(model, x, y, "mse", "loud")


def healthy_attention():
    # JAX's fused attention fails with float16 on a CPU inside a compiled step.
    # With dropout, Keras does not use it.
    dropout = 0.1 if keras.backend.backend() == "jax" else 0.0
    return keras.layers.MultiHeadAttention(2, 4, dropout=dropout)


def unscaled_attention(rng):
    depth = int(rng.integers(1, 4))
    place = int(rng.integers(0, depth))
    inputs = keras.Input((6, WIDTH))
    hidden = inputs
    for index in range(depth):
        hidden = keras.layers.Dense(WIDTH)(hidden)
        if index == place:
            gain = float(rng.choice([180.0, 400.0]))
            hidden = UnscaledAttention(gain, name="unscaled")(hidden)
        else:
            hidden = keras.layers.LayerNormalization()(
                hidden + healthy_attention()(hidden, hidden)
            )
    hidden = keras.layers.Flatten()(hidden)
    outputs = keras.layers.Activation("linear", dtype="float32")(
        keras.layers.Dense(3)(hidden)
    )
    x = rng.normal(size=(ROWS, 6, WIDTH)).astype("float32")
    y = rng.normal(size=(ROWS, 3)).astype("float32")
    return Planted(keras.Model(inputs, outputs), x, y, "mse", "unscaled")


def large_offset_variance(rng):
    depth = int(rng.integers(1, 6))
    place = int(rng.integers(0, depth + 1))
    planted = [Offset(), NaiveVariance(name="variance")]
    model, x, y = stack(planted, depth, place, rng)
    return Planted(model, x, y, "mse", "variance")


def loss_over_pixels(rng):
    depth = int(rng.integers(1, 4))
    hidden = [
        keras.layers.Conv2D(4, 3, padding="same", activation="relu")
        for _ in range(depth)
    ]
    model = keras.Sequential(
        [keras.Input((64, 64, 1)), *hidden, keras.layers.Conv2D(1, 1)]
    )
    x = rng.normal(size=(ROWS, 64, 64, 1)).astype("float32")
    y = x + 2.0

    def summed(y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred))

    return Planted(model, x, y, summed, "loss")


def faint_gradients(rng):
    depth = int(rng.integers(2, 7))
    place = int(rng.integers(1, depth + 1))
    model, x, y = stack([FaintGradient(name="faint")], depth, place, rng)
    return Planted(model, x, y, "mse", "faint", "backward")


def tiny_epsilon(rng):
    depth = int(rng.integers(0, 6))
    place = int(rng.integers(0, depth + 1))
    planted = [keras.layers.ReLU(), TinyEpsilon(name="tiny")]
    model, x, y = stack(planted, depth, place, rng)
    # A row of zeros stays zero until a bias changes.
    x[3] = 0.0
    return Planted(model, x, y, "mse", "tiny")


def embedding_row(rng):
    depth = int(rng.integers(0, 5))
    inputs = keras.Input((5,), dtype="int32")
    embedding = keras.layers.Embedding(40, WIDTH, name="table")
    hidden = keras.layers.LayerNormalization()(embedding(inputs))
    hidden = keras.layers.Flatten()(hidden)
    for _ in range(depth):
        hidden = keras.layers.Dense(WIDTH, "tanh")(hidden)
    outputs = keras.layers.Activation("linear", dtype="float32")(
        keras.layers.Dense(3)(hidden)
    )
    model = keras.Model(inputs, outputs)
    table = np.array(embedding.embeddings)
    row = int(rng.integers(0, 40))
    table[row] = 1e5 * rng.normal(size=WIDTH)
    table[row, 0] = 1e5
    embedding.embeddings.assign(table)
    x = rng.integers(0, 40, size=(ROWS, 5))
    y = rng.normal(size=(ROWS, 3)).astype("float32")
    return Planted(model, x, y, "mse", "table")


KINDS = {
    builder.__name__: builder
    for builder in (
        activation_overflow,
        unscaled_attention,
        large_offset_variance,
        loss_over_pixels,
        faint_gradients,
        tiny_epsilon,
        embedding_row,
    )
}


def plant(kind, seed):
    """Builds one planted fault in Keras's own "mixed_float16"."""
    # Else `compile` would give the model what keeps it from some of them.
    compile_method.stop_watching()
    keras.utils.set_random_seed(seed)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return KINDS[kind](np.random.default_rng(seed))
    finally:
        keras.config.set_dtype_policy(before)
