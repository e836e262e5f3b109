"""Eight planted faults in models that float32 trains well, and repeatably.

The faults are those of the held-out draws. The models have a shortcut around
each block, a learnable target and enough steps for the loss to fall.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

from tests.diagnostics import test_held_out as held_out

ROWS = 64
WIDTH = held_out.WIDTH
BLOCKS = 12
# A block adds its outputs to the shortcut around it, times this share.
SHARE = 0.3


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with a planted fault, its data, and how it is trained."""

    model: Any
    x: Any
    y: Any
    loss: Any
    layer: str
    rate: float = 3e-3
    epsilon: float = 1e-7


class Share(keras.layers.Layer):
    """Scales the outputs of a block."""

    def call(self, inputs):
        return inputs * SHARE


def around(hidden, parts):
    """Adds the outputs of some layers to their input."""
    inner = hidden
    for part in parts:
        inner = part(inner)
    return keras.layers.Add()([hidden, Share()(inner)])


def dense():
    return [keras.layers.Dense(WIDTH, "tanh")]


def residual(rng, shape, planted, make=dense, blocks=BLOCKS, first=False):
    """Plants layers in one of several blocks, each with a shortcut."""
    place = 0 if first else int(rng.integers(0, blocks))
    inputs = hidden = keras.Input(shape)
    for index in range(blocks):
        parts = planted if index == place else make()
        hidden = around(hidden, parts)
    hidden = keras.layers.LayerNormalization()(hidden)
    return keras.Model(inputs, head(hidden))


def head(hidden):
    for layer in held_out.head():
        hidden = layer(hidden)
    return hidden


def learnable(rng, shape):
    """Returns inputs, and targets that are a smooth function of them."""
    x = rng.normal(size=(ROWS, *shape)).astype("float32")
    flat = x.reshape(ROWS, -1)
    map_ = rng.normal(size=(flat.shape[-1], 3)) / flat.shape[-1] ** 0.5
    return x, np.tanh(2.0 * flat @ map_).astype("float32") + 0.5


def regression(rng, shape, planted, **settings):
    model = residual(rng, shape, planted, **settings)
    return Case(model, *learnable(rng, shape), "mse", "planted")


def activation_overflow(rng):
    form = rng.choice(["dense", "exponential", "conv", "power"])
    settings, shape, make = {"name": "planted"}, (WIDTH,), dense
    norm = keras.layers.LayerNormalization()
    if form == "conv":
        shape = (6, 6, WIDTH)
        settings["kernel_initializer"] = held_out.loud(3e5)
        planted = [keras.layers.Conv2D(WIDTH, 3, padding="same", **settings)]

        def make():
            return [keras.layers.Conv2D(WIDTH, 3, padding="same")]

    elif form == "power":
        planted = [held_out.Power(**settings)]
    elif form == "exponential":
        settings["bias_initializer"] = keras.initializers.Constant(13.0)
        planted = [keras.layers.Dense(WIDTH, "exponential", **settings)]
    else:
        settings["kernel_initializer"] = held_out.loud(5e5)
        planted = [keras.layers.Dense(WIDTH, "relu", **settings)]
    return regression(rng, shape, [*planted, norm], make=make)


def attention_without_scaling(rng):
    form = rng.choice(["matmul", "einsum"])
    layer = held_out.Heads(0.01, form, name="planted")
    # The scores are 75,000 and differ by a few. If they differed by thousands,
    # two trainings in float32 would end 10 % apart.
    offset = (75_000.0 / (WIDTH if form == "matmul" else WIDTH // 2)) ** 0.5
    for part in (layer.query, layer.key):
        part.bias_initializer = keras.initializers.Constant(offset)
        part.trainable = False
    return regression(rng, (5, WIDTH), [layer], blocks=4)


def variance_of_an_offset(rng):
    form = rng.choice(["var", "squares", "centred", "layer", "batch"])
    if form == "layer":
        norm = keras.layers.LayerNormalization(name="planted")
    elif form == "batch":
        norm = keras.layers.BatchNormalization(name="planted")
    else:
        norm = held_out.Standardised(form, name="planted")
    offset = 200.0 if form == "squares" else float(rng.choice([500.0, 2000.0]))
    return regression(rng, (WIDTH,), [held_out.Offset(offset), norm])


def loss_over_pixels(rng):
    form = rng.choice(["squares", "absolute", "per row"])
    side = 64

    def loss(y_true, y_pred):
        if form == "absolute":
            return ops.sum(ops.abs(y_true - y_pred))
        squares = ops.square(y_true - y_pred)
        return ops.sum(squares, None if form == "squares" else (1, 2, 3))

    inputs = hidden = keras.Input((side, side, 1))
    hidden = keras.layers.Conv2D(4, 3, padding="same")(hidden)
    for _ in range(int(rng.integers(0, 3))):
        made = keras.layers.Conv2D(4, 3, padding="same", activation="silu")
        hidden = around(hidden, [made])
    outputs = keras.layers.Conv2D(1, 3, padding="same")(hidden)
    x = rng.normal(size=(16, side, side, 1)).astype("float32")
    model = keras.Model(inputs, outputs)
    return Case(model, x, x + 5.0, loss, "loss", rate=0.02)


def vanishing_gradient(rng):
    form = rng.choice(["gate", "chain"])
    inputs = hidden = keras.Input((WIDTH,))
    for _ in range(int(rng.integers(1, 4))):
        hidden = around(hidden, dense())
    hidden = held_out.Faint(form, name="planted")(hidden)
    for _ in range(int(rng.integers(0, 3))):
        hidden = around(hidden, dense())
    model = keras.Model(inputs, head(hidden))
    x, y = learnable(rng, (WIDTH,))
    # Adam makes a whole step of small gradients, if its epsilon is smaller.
    return Case(model, x, y, "mse", "planted", epsilon=1e-20)


def epsilon_of_1e_8(rng):
    form = rng.choice(["self", "l2", "maximum", "log"])
    relu = keras.layers.ReLU()
    planted = [relu, held_out.Guarded(form, name="planted")]
    # If the divided values change in training, one that crosses 0 jumps.
    jumps = form in ("self", "log")
    case = regression(rng, (WIDTH,), planted, blocks=6, first=jumps)
    case.x[2] = 0.0
    return case


def embedding_row_of_1e5(rng):
    form = rng.choice(["keras", "by hand"])
    kind = keras.layers.Embedding if form == "keras" else held_out.Table
    sizes = (30, WIDTH) if form == "keras" else ()
    table = kind(*sizes, name="planted")
    inputs = keras.Input((4,), dtype="int32")
    hidden = keras.layers.LayerNormalization()(table(inputs))
    for _ in range(int(rng.integers(1, 5))):
        hidden = around(hidden, dense())
    model = keras.Model(inputs, head(hidden))
    (weight,) = table.trainable_variables
    values = np.array(weight)
    values[int(rng.integers(30))] = 1e5 * rng.choice([-1.0, 1.0], WIDTH)
    weight.assign(values)
    x = rng.integers(0, 30, (ROWS, 4)).astype("int32")
    y = np.sin(x[:, :3] * 0.7).astype("float32")
    return Case(model, x, y, "mse", "planted")


# The same kinds of fault, on models that can be trained.
KINDS = {kind: globals()[kind] for kind in held_out.KINDS}


def plant(kind, seed):
    """Builds one planted fault in "mixed_float16"."""
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy("mixed_float16")
    return KINDS[kind](np.random.default_rng(seed))
